"""Edits of a valid document: hostile values at any place, keys doubled, bytes damaged."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

MANY = 100_000


def listed(text: str) -> list[str]:
    """Return the entries of a text; two spaces or a new line part them."""
    return re.split(r" *(?:  |\n) *", text.strip())


# JSON as it stands in the file, since Python has no value for much of it.
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
    "100,000 digits": "9" * MANY,
    "long text": '"' + "x" * MANY + '"',
    "long name": '"' + "n" * 5000 + '"',
    "long list": "[" + "1, " * MANY + "1]",
    "long list of texts": "[" + '"a", ' * MANY + '"a"]',
    "hundred ids": json.dumps(list(range(100))),
    "big object": json.dumps({str(i): i for i in range(20_000)}),
    "deep list": "[" * MANY + "]" * MANY,
    "deep object": '{"a":' * MANY + "1" + "}" * MANY,
    "rather deep list": "[" * 500 + "]" * 500,
}
_KINDS = (*("replace",) * 6, "alter", "alter", "delete", "duplicate", "rename", "swap", "wrap", "text")
_DAMAGES = listed("flip  flip  truncate  cut  insert  empty  bom  utf-16  zeros  append  twice  newlines")
_WIDE, _DEPTH = 40, 7  # of a wider object only its ends are edited; nothing below this depth is


class Edit(NamedTuple):
    """One change of a document; places are counted round and round."""

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
    return random.randint(0, 10**6)


def edits(random: Random) -> list[Edit]:
    """Return one edit or a few."""

    def edit() -> Edit:
        value = random.choice(random.choice([*_GROUPS, list(_HUGE)]))
        return Edit(random.choice(_KINDS), place(random), place(random), value)

    return [edit() for _ in range(random.choice((1, 1, 1, 2, 3)))]


def damage(random: Random) -> Damage:
    """Return one damage."""
    return Damage(random.choice(_DAMAGES), place(random), random.randbytes(random.randint(1, 9)))


def damages(random: Random) -> list[Damage]:
    """Return one damage or two."""
    return [damage(random) for _ in range(random.randint(1, 2))]


def changes(random: Random) -> list[Edit] | list[Damage]:
    """Return what is done to a JSON document, or to its bytes."""
    return random.choice((edits, edits, edits, damages))(random)


def mutated(data: bytes, changes: list[Edit] | list[Damage]) -> bytes:
    """Return a JSON document after its changes."""
    if isinstance(changes[0], Damage):
        for change in changes:
            data = damaged(data, change)
        return data
    document, raw = json.loads(data), {}
    for edit in changes:
        _edit(document, edit, raw)
    text = json.dumps(document)
    for mark, value in raw.items():
        text = text.replace(mark, value)
    return text.encode()


def damaged(data: bytes, damage: Damage) -> bytes:
    """Return bytes after one damage."""
    at, some = damage.where * len(data) // 10**6, damage.bytes
    last = min(at, len(data) - 1)
    made: dict[str, Callable[[], bytes]] = {
        "flip": lambda: data[:last] + bytes([data[last] ^ (1 << some[0] % 8)]) + data[last + 1 :] if data else some,
        "truncate": lambda: data[:at],
        "cut": lambda: data[:at] + data[at + len(some) :],
        "insert": lambda: data[:at] + some + data[at:],
        "empty": lambda: b"",
        "bom": lambda: b"\xef\xbb\xbf" + data,
        "utf-16": lambda: data.decode("latin-1").encode("utf-16"),
        "zeros": lambda: data[:at] + bytes(len(data) - at),
        "append": lambda: data + some,
        "twice": lambda: data + data,
        "newlines": lambda: data.replace(b"\n", b"\r"),
    }
    return made[damage.kind]()


def _edit(document: Any, edit: Edit, raw: dict[str, str]) -> None:
    """Change a document in place; marks stand for text that is put in when it is written."""
    top = list(document) if isinstance(document, dict) and edit.other % 2 else []
    places = [(document, key) for key in top] or _places(document)
    if not places:
        return
    holder, key = places[edit.place % len(places)]
    value = holder[key]

    def mark(text: str) -> str:
        name = f"@raw{len(raw)}@"
        raw[f'"{name}"'] = text
        return name

    match edit.kind:
        case "replace":
            holder[key] = mark(_HUGE.get(edit.value, edit.value))
        case "delete":
            del holder[key]
        case "duplicate" if isinstance(holder, list):
            holder.append(value)
        case "duplicate":
            twin = f"@twin{len(raw)}@"
            raw[twin] = ""  # which makes the two keys one
            holder[f"{key}{twin}"] = mark(_HUGE.get(edit.value, edit.value))
        case "rename" if isinstance(holder, dict):
            holder[f"{key}_" if edit.other % 3 else key[::-1]] = holder.pop(key)
        case "swap":
            other, name = places[edit.other % len(places)]
            if not isinstance(value, dict | list) and not isinstance(
                other[name], dict | list
            ):  # or one holds the other
                holder[key], other[name] = other[name], value
        case "wrap":
            holder[key] = [value]
        case "text":
            holder[key] = str(value)
        case _ if type(value) in (int, float):
            altered = (value + 1, value - 1, -value, value * 2, value / 2, value * 1000, value * 10**6, value * 10**9)
            holder[key] = altered[edit.other % len(altered)]


def _places(document: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every place of a document as its holder and its key."""
    if depth == _DEPTH or not isinstance(document, dict | list):
        return []
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    if len(keys) > _WIDE:
        keys = keys[:3] + keys[-3:]
    return [place for key in keys for place in [(document, key), *_places(document[key], depth + 1)]]
