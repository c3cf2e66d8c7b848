"""Edits of a valid JSON document, and damage to the bytes of a file."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple


def listed(text: str) -> list[str]:
    """Return the entries of a text that two spaces or a new line separate."""
    return re.split(r" *(?:  |\n) *", text.strip())


# As JSON text, since Python has no value for much of it.
_GROUPS = [
    listed(text)
    for text in (
        'null  true  false  []  {}  [null]  [1, 2]  [true]  [[1]]  ["a"]  {"a": 1}  [{}]  "7"',
        "0  1  2  3  7  -1  0.5  -0.5  -0.0  1.0  65  4096  1e-320  1e9",
        "1000000  1000000000  -1000000000  2147483648  4294967296  9223372036854775808  100000000000000000000000000000",
        "NaN  Infinity  -Infinity  1e400  -1e400  1e308  1e39",
        r'""  " "  "word"  "-1"  "true"  "null"  "[]"  "é"  "a b"  "{{ 1 }}"  "\\"  "<s>"',
        '"../x"  "/etc/passwd"  ".."  "."  "~"  "x/../../x"  "CON"  "/dev/zero"  "config.json"',
        r'"\u0000"  "\ud800"  "\udc00x"  "a\nb\n\nc"  "\u202e"  "\u001b[2J"  "𐍈"  "("',
        '{"content": null}  {"content": {}}  {"content": "a"}  {"Regex": "(a*)*b"}  {"name": "default"}',
    )
]
_HUGE = {
    "5,000 digits": "9" * 5000,
    "100,000 digits": "9" * 10**5,
    "long text": '"' + "x" * 10**5 + '"',
    "long list": "[" + "1, " * 10**5 + "1]",
    "long list of texts": "[" + '"a", ' * 10**5 + '"a"]',
    "big object": json.dumps({str(i): i for i in range(20_000)}),
    "deep list": "[" * 10**5 + "]" * 10**5,
    "deep object": '{"a":' * 10**5 + "1" + "}" * 10**5,
    "rather deep list": "[" * 500 + "]" * 500,
}
_KINDS = (*("replace",) * 6, "alter", "alter", "delete", "duplicate", "rename", "swap", "wrap", "text")
_FACTORS = (-1, 2, 0.5, 1000, 10**6, 10**9)
_WIDE, _DEPTH = 40, 7  # of a wider object only its ends are edited; nothing below this depth is
# From the data, a position in them and a few random bytes.
_DAMAGES: dict[str, Callable[[bytes, int, bytes], bytes]] = {
    "flip": lambda data, at, some: data[:at] + bytes([data[at] ^ 1 << some[0] % 8]) + data[at + 1 :],
    "truncate": lambda data, at, _: data[:at],
    "cut": lambda data, at, some: data[:at] + data[at + len(some) :],
    "insert": lambda data, at, some: data[:at] + some + data[at:],
    "empty": lambda *_: b"",
    "bom": lambda data, *_: b"\xef\xbb\xbf" + data,
    "utf-16": lambda data, *_: data.decode("latin-1").encode("utf-16"),
    "zeros": lambda data, at, _: data[:at] + bytes(len(data) - at),
    "append": lambda data, _, some: data + some,
    "twice": lambda data, *_: data + data,
    "newlines": lambda data, *_: data.replace(b"\n", b"\r"),
}


class Edit(NamedTuple):
    """One change of a document; `place` and `other` count its places round and round."""

    kind: str
    place: int
    other: int
    value: str


class Damage(NamedTuple):
    """One change of the bytes of a file at `where` millionths of its length."""

    kind: str
    where: int
    bytes: bytes


def place(random: Random) -> int:
    """Return a place: a number to be counted round and round, or millionths."""
    return random.randrange(10**6)


def edits(random: Random) -> list[Edit]:
    """Return one edit or a few."""

    def edit() -> Edit:
        value = random.choice(random.choice([*_GROUPS, list(_HUGE)]))
        return Edit(random.choice(_KINDS), place(random), place(random), value)

    return [edit() for _ in range(random.choice((1, 1, 1, 2, 3)))]


def damages(random: Random) -> list[Damage]:
    """Return one damage or two."""
    kinds = random.choices(("flip", *_DAMAGES), k=random.randint(1, 2))
    return [Damage(kind, place(random), random.randbytes(random.randint(1, 9))) for kind in kinds]


def changes(random: Random) -> list[Edit] | list[Damage]:
    """Return changes of a JSON document, or of its bytes."""
    return random.choice((edits, edits, edits, damages))(random)


def mutated(data: bytes, changes: list[Edit] | list[Damage]) -> bytes:
    """Return a JSON document after its edits, or the bytes of a file after its damages."""
    document, marked = (json.loads(data) if isinstance(changes[0], Edit) else None), {}
    for change in changes:
        if isinstance(change, Edit):
            _edit(document, change, marked)
        elif data:
            data = _DAMAGES[change.kind](data, change.where * len(data) // 10**6, change.bytes)
    if document is None:
        return data
    text = json.dumps(document)
    for mark, value in marked.items():
        text = text.replace(mark, value)
    return text.encode()


def _edit(document: Any, edit: Edit, marked: dict[str, str]) -> None:
    """Change a document in place. Marks stand for text that is inserted when the document is written."""
    top = list(document) if isinstance(document, dict) and edit.other % 2 else []
    places = [(document, key) for key in top] or _places(document)
    if not places:
        return
    holder, key = places[edit.place % len(places)]
    other, name = places[edit.other % len(places)]
    value, mark = holder[key], f"@{len(marked)}@"
    match edit.kind:
        case "duplicate" if isinstance(holder, list):
            holder.append(value)
        case "replace" | "duplicate":
            marked[f'"{mark}"'] = _HUGE.get(edit.value, edit.value)
            if edit.kind == "duplicate":
                marked[f"{mark}twin"] = ""  # two keys of the same text
                key = f"{key}{mark}twin"
            holder[key] = mark
        case "delete":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[f"{key}_" if edit.other % 3 else key[::-1]] = holder.pop(key)
        case "swap" if not isinstance(value, dict | list) and not isinstance(other[name], dict | list):
            holder[key], other[name] = other[name], value
        case "wrap":
            holder[key] = [value]
        case "text":
            holder[key] = str(value)
        case "alter" if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = (value + 1, value - 1, *(value * factor for factor in _FACTORS))[edit.other % 8]


def _places(document: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every place of a document as its holder and its key."""
    if depth == _DEPTH or not isinstance(document, dict | list):
        return []
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    keys = keys if len(keys) <= _WIDE else keys[:3] + keys[-3:]
    return [place for key in keys for place in [(document, key), *_places(document[key], depth + 1)]]
