"""The planted faults match the code as it is."""

from scripts_here import script


def test_every_fault_stands_once_in_its_file():
    assert len(script("plant_faults").faults()) >= 77
