"""The documents show the tables of the recorded results."""

import json

import pytest
from scripts_here import script

writer = script("write_tables")
PARTS = [
    (document, *part)
    for document, parts in (("control.md", writer.CONTROL), ("serving.md", writer.SERVING))
    for part in parts.values()
]


@pytest.mark.parametrize(("document", "file", "shown"), PARTS, ids=[*writer.CONTROL, *writer.SERVING])
def test_a_document_shows_what_was_recorded(document, file, shown):
    results = json.loads((writer.RESULTS / file).read_text(encoding="utf-8"))
    text = (writer.DOCS / document).read_text(encoding="utf-8")
    assert f"{writer.origin(results)}\n\n{shown(results)}" in text


def test_the_least_times_are_those_shown():
    assert writer.roofline() in (writer.DOCS / "kernels.md").read_text(encoding="utf-8")
