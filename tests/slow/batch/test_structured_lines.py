"""Three hundred lines of a batch file, some with a grammar, good or bad: none ends or changes another."""

import json
import random
import re

import jsonschema
import pytest

from et_jax.generate import main

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["north", "south"]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "hours"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
GOOD = [{"response_format": STRICT}, {"regex": "[0-9]{2}:[0-5][0-9]"}, {"choice": ["yes", "no", "not yet"]}]
BAD = [
    *({"json_schema": one} for one in ({"type": "strin"}, {"not": {}}, {"$ref": "#"}, {"multipleOf": 99991})),
    *({"regex": one} for one in ("((", "[a&&b]", "(?=a)b", "(a|b)\\1")),
    *({"response_format": one} for one in ("json", {"type": "xml"}, {"type": "json_schema"})),
    *({"choice": "yes"}, {"choice": ["yes"], "regex": "a"}, {"json_schema": "{"}),
    {"regex": "[0-9]", "allowed_token_ids": [400]},
]


def answered(folder, name, lines, capfd) -> dict[str, dict]:
    source, output = folder / f"{name}.jsonl", folder / f"{name}.out"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--model", "bundled-small", "--input", str(source), "--output", str(output)]) == 0, capfd.readouterr()
    return {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}


def text(row) -> str:
    [choice] = row["response"]["body"]["choices"]
    return choice["text"]


def holds(line, said: str) -> bool:
    if "regex" in line:
        return re.fullmatch(line["regex"], said) is not None
    if "choice" in line:
        return said in line["choice"]
    jsonschema.validate(json.loads(said), SCHEMA)
    return True


@pytest.mark.usefixtures("hardly_optimised")
def test_a_line_with_a_grammar_ends_and_changes_no_other(tmp_path, capfd):
    drawn, lines = random.Random(0), []
    for number in range(300):
        kind = drawn.choice(("plain", "good", "bad"))
        own = {"good": drawn.choice(GOOD), "bad": drawn.choice(BAD)}.get(kind, {"max_tokens": drawn.randint(1, 20)})
        prompt = drawn.choice(("It was", "The sea", "No"))
        lines.append((kind, {"id": str(number), "prompt": prompt, "seed": number} | own))
    rows = answered(tmp_path, "mixed", [line for _, line in lines], capfd)
    alone = answered(tmp_path, "plain", [line for kind, line in lines if kind == "plain"], capfd)
    assert len(rows) == 300
    ends = []
    for kind, line in lines:
        row = rows[line["id"]]
        if kind == "bad":
            said = row["error"]["message"]
            assert said.endswith(".") and "\n" not in said and len(said) < 300, said
        elif kind == "plain":
            assert text(row) == text(alone[line["id"]])
        else:
            ends.append(row["response"]["body"]["choices"][0]["finish_reason"])
            assert ends[-1] == "length" or holds(line, text(row)), line
    assert ends.count("stop") > 0.9 * len(ends) > 70
