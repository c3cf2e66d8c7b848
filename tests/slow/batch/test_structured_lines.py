"""Three hundred lines of a batch file, some with a grammar, good or bad: none ends or changes another."""

import json
import random
import re

import jsonschema
import pytest
from served import SCHEMA

from et_jax.generate import main

STRICT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
GOOD = [{"response_format": STRICT}, {"regex": "[0-9]{2}:[0-5][0-9]"}, {"choice": ["yes", "no", "not yet"]}]
BAD = [
    *({"json_schema": one} for one in ({"type": "strin"}, {"not": {}}, {"$ref": "#"}, {"multipleOf": 99991})),
    *({"regex": one} for one in ("((", "[a&&b]", "(?=a)b", "(a|b)\\1")),
    *({"response_format": one} for one in ("json", {"type": "xml"}, {"type": "json_schema"})),
    *({"choice": "yes"}, {"choice": ["yes"], "regex": "a"}, {"json_schema": "{"}),
    {"regex": "[0-9]", "allowed_token_ids": [400]},
]


def answered(folder, name, lines) -> dict[str, dict]:
    source, output = folder / f"{name}.jsonl", folder / f"{name}.out"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--model", "bundled-small", "--input", str(source), "--output", str(output)]) == 0
    return {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}


def holds(line, said: str) -> bool:
    if "regex" in line:
        return re.fullmatch(line["regex"], said) is not None
    if "choice" in line:
        return said in line["choice"]
    jsonschema.validate(json.loads(said), SCHEMA)
    return True


@pytest.mark.usefixtures("hardly_optimised")
def test_a_line_with_a_grammar_ends_and_changes_no_other(tmp_path):
    kinds = [*GOOD * 33, *BAD * 7, *[{"max_tokens": 12}] * 96]
    random.Random(0).shuffle(kinds)
    lines = [{"id": str(i), "prompt": ("It was", "No")[i % 2], "seed": i} | own for i, own in enumerate(kinds)]
    rows = answered(tmp_path, "mixed", lines)
    alone = answered(tmp_path, "plain", [line for line, own in zip(lines, kinds, strict=True) if "max_tokens" in own])
    assert len(rows) == len(lines)
    for line, own in zip(lines, kinds, strict=True):
        row = rows[line["id"]]
        if own in BAD:
            said = row["error"]["message"]
            assert said.endswith(".") and "\n" not in said and len(said) < 300, said
            continue
        [choice] = row["response"]["body"]["choices"]
        if own in GOOD:
            assert choice["finish_reason"] == "stop" and holds(line, choice["text"]), line
        else:
            assert choice["text"] == alone[line["id"]]["response"]["body"]["choices"][0]["text"]
