"""The planted faults match the code as it is."""

import pytest
from scripts_here import script


def test_every_fault_stands_once_in_its_file():
    assert len(script("plant_faults").faults()) >= 77


@pytest.mark.parametrize(("old", "count"), [("no such line", 0), ("import ", 2)])
def test_a_fault_that_is_not_exactly_once_in_its_file_is_refused(tmp_path, monkeypatch, old, count):
    faults = script("plant_faults")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").write_text("import ast\nimport sys\n")
    (tmp_path / "area.toml").write_text(f'[[fault]]\nfile = "package/module.py"\nwhat = "w"\nold = "{old}"\nnew = ""\n')
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "FAULTS", tmp_path)
    with pytest.raises(SystemExit, match=rf"area.toml: 'w': package/module.py has .* {count} times"):
        faults.faults()
