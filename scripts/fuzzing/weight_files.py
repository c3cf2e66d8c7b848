"""The weights' index and the safetensors files: names that lead out, headers that lie, files damaged or absent."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing.cases import ACCEPTED, Fault, Surface
from fuzzing.edits import DAMAGES, FEW_EDITS, PLACES, Damage, Edit, Mutation, damaged, mutated
from fuzzing.small_folder import GPT_OSS, open_model, overlay, write_model
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

INDEX, SHARDS = "model.safetensors.index.json", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_OUTSIDE = "outside.safetensors"  # beside the folder: a file that a name can reach only by leaving it
_MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gpt_oss": {"config": GPT_OSS, "packed": True}}
_LENGTHS = (0, 1, 7, 8, 10**8, 10**8 + 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to which of the files of a model: 0 the index, 1 and 2 the shards."""

    model: str
    kind: str
    file: int
    edits: tuple[Edit, ...]
    damage: Damage
    place: int


def prepare(folder: Path) -> Callable[[Case], str]:
    """Write models in two files each and one outside, and return what runs a case."""
    bases = {name: _in_two(write_model(folder / name / "base", **settings)) for name, settings in _MODELS.items()}

    def run(case: Case) -> str:
        base = bases[case.model]
        changed = overlay(folder / case.model / "changed", base, _changes(base, case))
        if case.kind == "folder":
            (changed / SHARDS[0]).unlink()
            (changed / SHARDS[0]).mkdir()
        model = open_model(changed)
        for name in _mapped(changed / INDEX):
            if not (changed / name).resolve().is_relative_to(changed.resolve()):
                raise Fault("escape", f"the index names {name}, which lies outside")
        model.describe()
        return ACCEPTED

    return run


def _in_two(base: Path) -> Path:
    """Divide the weights of a folder, put a part beside it, and return the folder."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, base / shard)
    save_file({name: tensors[name] for name in shards[SHARDS[0]]}, base.parent / _OUTSIDE)
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (base / INDEX).write_text(json.dumps(index, indent=2))
    return base


def _changes(base: Path, case: Case) -> dict[str, bytes | None]:
    target = (INDEX, *SHARDS)[case.file]
    shard = SHARDS[case.file % 2]
    data = (base / target).read_bytes()
    match case.kind:
        case "index":
            return {INDEX: mutated((base / INDEX).read_bytes(), Mutation(edits=case.edits))}
        case "header":
            return {shard: _with_header((base / shard).read_bytes(), Mutation(edits=case.edits))}
        case "header bytes":
            return {shard: _with_header((base / shard).read_bytes(), Mutation(damages=(case.damage,)))}
        case "length":
            length = _LENGTHS[case.place % len(_LENGTHS)]
            return {shard: length.to_bytes(8, "little") + (base / shard).read_bytes()[8:]}
        case "damage":
            return {target: damaged(data, case.damage)}
        case "absent":
            return {target: None}
        case "swap":
            return {SHARDS[0]: (base / SHARDS[1]).read_bytes(), SHARDS[1]: (base / SHARDS[0]).read_bytes()}
        case "same":
            return {SHARDS[0]: (base / SHARDS[1]).read_bytes()}
        case "bin":
            return {INDEX: None, SHARDS[0]: None, SHARDS[1]: None, "pytorch_model.bin": b"PK"}
        case "outside":
            index = json.loads((base / INDEX).read_text())
            way = (f"../{_OUTSIDE}", str(base.parent.resolve() / _OUTSIDE), f"./../{_OUTSIDE}", f"x/../../{_OUTSIDE}")
            changed = {
                name: way[case.place % 4] if shard == SHARDS[0] else shard
                for name, shard in index["weight_map"].items()
            }
            return {INDEX: json.dumps({"weight_map": changed}).encode()}
    return {}


def _with_header(data: bytes, mutation: Mutation) -> bytes:
    """Return a safetensors file whose header is changed, and its length with it."""
    length = int.from_bytes(data[:8], "little")
    header = mutated(data[8 : 8 + length].rstrip(b" "), mutation)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _mapped(index: Path) -> list[str]:
    """Return the files that an index which was accepted names."""
    return [str(name) for name in json.loads(index.read_text())["weight_map"].values()] if index.exists() else []


_KINDS = ("index", "index", "index", "header", "header", "header", "header bytes", "length", "damage", "damage")

SURFACE = Surface(
    cases=st.builds(
        Case,
        model=st.sampled_from(tuple(_MODELS)),
        kind=st.sampled_from((*_KINDS, "absent", "swap", "same", "bin", "folder", "outside")),
        file=st.integers(0, 2),
        edits=FEW_EDITS,
        damage=DAMAGES,
        place=PLACES,
    ),
    prepare=prepare,
)
