"""The documents show the tables of the recorded results."""

import json

import pytest
from scripts_here import script

writer = script("write_tables")
PARTS = {name: (document, *part) for document, parts in writer.DOCUMENTS.items() for name, part in parts.items()}


@pytest.mark.parametrize(("document", "file", "shown"), PARTS.values(), ids=PARTS)
def test_a_document_shows_what_was_recorded(document, file, shown):
    results = json.loads((writer.RESULTS / file).read_text(encoding="utf-8"))
    text = (writer.DOCS / document).read_text(encoding="utf-8")
    assert f"{writer.origin(results)}\n\n{shown(results)}" in text


def test_the_least_times_are_those_shown():
    assert writer.roofline() in (writer.DOCS / "kernels.md").read_text(encoding="utf-8")
    assert writer.self_drafting() in (writer.DOCS / "drafting.md").read_text(encoding="utf-8")
