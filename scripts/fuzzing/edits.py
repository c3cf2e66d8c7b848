"""Edits of a valid document, drawn by hypothesis: hostile values at any place, keys doubled, bytes damaged."""

import dataclasses
import json
from typing import Any

from hypothesis import strategies as st

MANY = 100_000
# JSON as it stands in the file, since much of it has no value in Python that could be written.
HOSTILE = {
    **{text: text for text in ("null", "true", "false", "0", "1", "2", "-1", "3", "0.5", "-0.5", "-0.0", "1.0", "7")},
    **{text: text for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-320", "1e30", "65", "4096")},
    **{text: text for text in ("1000000", "1000000000", "-1000000000", "2147483648", "9223372036854775808", "1e9")},
    **{text: text for text in ("[]", "{}", "[null]", "[1, 2]", "[true]", "[[1]]", '["a"]', '{"a": 1}', "[{}]")},
    **{text: text for text in ('""', '" "', '"word"', '"7"', '"-1"', '"true"', '"null"', '"None"', '"[]"')},
    **{text: text for text in ('"../x"', '"/etc/passwd"', '".."', '"."', '"~"', '"x/../../x"', '"CON"', '"a b"')},
    **{text: text for text in (r'"\u0000"', r'"\ud800"', r'"\udc00x"', r'"a\nb\n\nc"', '"é"', r'"\u202e"', '"𐍈"')},
    **{text: text for text in ('"(a+)+$"', '"(a|a)*b"', '"("', '"[\\\\p{L"', '"(?=a)*"', '"\\\\"', '"{{ 1 }}"')},
    **{text: text for text in ('{"content": null}', '{"content": {}}', '{"content": "a"}', '{"Regex": "(a*)*b"}')},
    "10^30": "1" + "0" * 30,
    "5,000 digits": "9" * 5000,
    "100,000 digits": "9" * MANY,
    "long text": '"' + "x" * MANY + '"',
    "long name": '"' + "n" * 5000 + '"',
    "long list": "[" + "1, " * MANY + "1]",
    "long list of texts": "[" + '"a", ' * MANY + '"a"]',
    "big object": "{" + ", ".join(f'"{i}": {i}' for i in range(20_000)) + "}",
    "deep list": "[" * MANY + "]" * MANY,
    "deep object": '{"a":' * MANY + "1" + "}" * MANY,
    "rather deep list": "[" * 500 + "]" * 500,
}
_KINDS = ("replace", "replace", "replace", "replace", "delete", "duplicate", "rename", "swap", "wrap", "text", "alter")
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
EDITS = st.builds(Edit, kind=st.sampled_from(_KINDS), place=PLACES, other=PLACES, value=st.sampled_from(tuple(HOSTILE)))
DAMAGES = st.builds(Damage, kind=st.sampled_from(_DAMAGES), where=PLACES, bytes=st.binary(min_size=1, max_size=9))
_EDITED = st.builds(Mutation, edits=st.lists(EDITS, min_size=1, max_size=3).map(tuple))
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
            holder[key] = (value + 1, value - 1, -value, value * 2, value / 2, value * 1000)[edit.other % 6]


def _places(document: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every place of a document as its holder and its key."""
    if depth == _DEPTH or not isinstance(document, dict | list):
        return []
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    if len(keys) > _WIDE:
        keys = keys[:3] + keys[-3:]
    return [place for key in keys for place in [(document, key), *_places(document[key], depth + 1)]]
