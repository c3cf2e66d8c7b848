"""The faults that tests are tried with stand in the code as it is."""

from scripts_here import script


def test_every_fault_stands_once_in_its_file():
    faults = script("plant_faults").faults()
    assert len(faults) >= 77 and all(fault["old"] != fault["new"] for fault in faults)
