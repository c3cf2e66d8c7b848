"""Edits of a valid document, drawn by hypothesis: hostile values at any place, keys doubled, bytes damaged."""

import dataclasses
import json
from typing import Any

from hypothesis import strategies as st

MANY = 100_000
# JSON as it stands in the file, since much of it has no value in Python that could be written.
_TYPES = (
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "[null]",
    "[1, 2]",
    "[true]",
    "[[1]]",
    '["a"]',
    '{"a": 1}',
    "[{}]",
    '"7"',
)
_NUMBERS = ("0", "1", "2", "3", "7", "-1", "0.5", "-0.5", "-0.0", "1.0", "65", "4096", "1e-320", "1e9")
_LARGE = ("1000000", "1000000000", "-1000000000", "2147483648", "4294967296", "9223372036854775808", "1" + "0" * 30)
_NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e308", "1e39")
_TEXTS = ('""', '" "', '"word"', '"-1"', '"true"', '"null"', '"[]"', '"é"', '"a b"', '"{{ 1 }}"', r'"\\"', '"<s>"')
_NAMES = ('"../x"', '"/etc/passwd"', '".."', '"."', '"~"', '"x/../../x"', '"CON"', '"/dev/zero"', '"config.json"')
_ODD_TEXTS = (r'"\u0000"', r'"\ud800"', r'"\udc00x"', r'"a\nb\n\nc"', r'"\u202e"', r'"\u001b[2J"', '"𐍈"', '"("')
_PARTS = ('{"content": null}', '{"content": {}}', '{"content": "a"}', '{"Regex": "(a*)*b"}', '{"name": "default"}')
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
_GROUPS = (_TYPES, _NUMBERS, _LARGE, _NOT_FINITE, _TEXTS, _NAMES, _ODD_TEXTS, _PARTS, tuple(_HUGE))
HOSTILE = {text: text for group in _GROUPS for text in group} | _HUGE
_KINDS = (*("replace",) * 6, *("alter",) * 2, "delete", "duplicate", "rename", "swap", "wrap", "text")
_DAMAGES = (
    "flip",
    "flip",
    "truncate",
    "cut",
    "insert",
    "empty",
    "bom",
    "utf-16",
    "zeros",
    "append",
    "twice",
    "newlines",
)
_WIDE, _DEPTH = 40, 7  # of a wider object only its ends are edited; nothing below this depth is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of a document; places are counted around."""

    kind: str
    place: int
    other: int
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """One change of the bytes of a file at `where` millionths of its length."""

    kind: str
    where: int
    bytes: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """What is done to a document, and to the bytes it is then written as."""

    edits: tuple[Edit, ...] = ()
    damages: tuple[Damage, ...] = ()


PLACES = st.integers(0, 10**6)
EDITS = st.builds(
    Edit,
    kind=st.sampled_from(_KINDS),
    place=PLACES,
    other=PLACES,
    value=st.sampled_from(_GROUPS).flatmap(st.sampled_from),
)
DAMAGES = st.builds(Damage, kind=st.sampled_from(_DAMAGES), where=PLACES, bytes=st.binary(min_size=1, max_size=9))
FEW_EDITS = st.sampled_from((1, 1, 1, 2, 3)).flatmap(
    lambda count: st.lists(EDITS, min_size=count, max_size=count).map(tuple)
)
_EDITED = st.builds(Mutation, edits=FEW_EDITS)
_DAMAGED = st.builds(Mutation, damages=st.lists(DAMAGES, min_size=1, max_size=2).map(tuple))
MUTATIONS = st.sampled_from((_EDITED, _EDITED, _EDITED, _DAMAGED)).flatmap(lambda chosen: chosen)


def mutated(data: bytes, mutation: Mutation) -> bytes:
    """Return a JSON document after its mutation."""
    if mutation.edits:
        document, raw = json.loads(data), {}
        for edit in mutation.edits:
            _edit(document, edit, raw)
        text = json.dumps(document)
        for mark, value in raw.items():
            text = text.replace(mark, value)
        data = text.encode()
    for damage in mutation.damages:
        data = damaged(data, damage)
    return data


def damaged(data: bytes, damage: Damage) -> bytes:
    """Return bytes after one damage."""
    at, some = damage.where * len(data) // 10**6, damage.bytes
    match damage.kind:
        case "flip":
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ (1 << some[0] % 8)]) + data[at + 1 :] if data else some
        case "truncate":
            return data[:at]
        case "cut":
            return data[:at] + data[at + len(some) :]
        case "insert":
            return data[:at] + some + data[at:]
        case "empty":
            return b""
        case "bom":
            return b"\xef\xbb\xbf" + data
        case "utf-16":
            return data.decode("latin-1").encode("utf-16")
        case "zeros":
            return data[:at] + bytes(len(data) - at)
        case "append":
            return data + some
        case "twice":
            return data + data
        case "newlines":
            return data.replace(b"\n", b"\r")
    raise ValueError(f"kind is {damage.kind!r}; it must be one of {', '.join(_DAMAGES)}.")


def _edit(document: Any, edit: Edit, raw: dict[str, str]) -> None:
    """Change a document in place; marks stand for text that is put in when it is written."""
    top = list(document.items()) if isinstance(document, dict) else []
    places = [(document, key) for key, _ in top] if edit.other % 2 else []
    places = places or _places(document)
    if not places:
        return
    holder, key = places[edit.place % len(places)]
    value = holder[key]
    match edit.kind:
        case "replace":
            mark = f"@raw{len(raw)}@"
            raw[f'"{mark}"'] = HOSTILE[edit.value]
            holder[key] = mark
        case "delete":
            del holder[key]
        case "duplicate" if isinstance(holder, list):
            holder.append(value)
        case "duplicate":
            mark, copy = f"@twin{len(raw)}@", f"@raw{len(raw) + 1}@"
            raw[mark] = ""
            raw[f'"{copy}"'] = HOSTILE[edit.value]
            holder[f"{key}{mark}"] = copy
        case "rename" if isinstance(holder, dict):
            holder[f"{key}_" if edit.other % 3 else key[::-1]] = holder.pop(key)
        case "swap":
            other, name = places[edit.other % len(places)]
            if isinstance(value, dict | list) or isinstance(other[name], dict | list):
                return  # one may hold the other
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
