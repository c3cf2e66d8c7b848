"""What every measuring script writes."""

import json

from scripts.measuring import results


def test_a_table_is_markdown():
    text = results.table(["law", "mean"], [["a|b", 0.123456], ["none", None], ["big", 1234567.0]])
    assert text.splitlines() == [
        "| law | mean |",
        "| --- | --- |",
        r"| a\|b | 0.123 |",
        "| none | - |",
        "| big | 1,234,567 |",
    ]


def test_figures_come_with_their_origin(tmp_path):
    results.write(tmp_path / "new" / "figures.json", "scripts/it.py", {"rounds": 3}, rows=[1, 2])
    content = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert (content["script"], content["settings"], content["rows"]) == ("scripts/it.py", {"rounds": 3}, [1, 2])
    assert {"processor", "cores", "device", "jax"} <= content["machine"].keys()
