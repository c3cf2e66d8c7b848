"""The index and the safetensors files: names outside the folder, false headers, files damaged or absent."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from safetensors.numpy import load_file, save_file

from scripts.fuzzing import edits
from scripts.fuzzing.small_folder import GPT_OSS, open_model, overlay, write_model
from scripts.fuzzing.watch import ACCEPTED, Fault

INDEX, SHARDS = "model.safetensors.index.json", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_OUTSIDE = "outside.safetensors"  # beside the folder
_MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gpt_oss": {"config": GPT_OSS, "packed": True}}
_LENGTHS = (0, 1, 7, 8, 10**8, 10**8 + 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
_KINDS = (*("index", "header", "damage") * 3, "length", "absent", "swap", "bin", "folder", "out")


def draw(random: Random) -> dict[str, Any]:
    """Return a case: a model, the kind of change, the file, and the edits or damages."""
    kind = random.choice(_KINDS)
    file = random.choice((INDEX, *SHARDS) if kind in ("damage", "absent") else SHARDS)
    changes = edits.damages(random) if kind == "damage" else edits.changes(random)
    model, place = random.choice(list(_MODELS)), edits.place(random)
    return {"model": model, "kind": kind, "file": file, "changes": changes, "place": place}


def prepare(folder: Path) -> Callable[..., str]:
    """Write models in two files each and one outside, and return the function that runs a case."""
    bases = {name: _in_two(write_model(folder / name / "base", **settings)) for name, settings in _MODELS.items()}

    def run(model: str, **case: Any) -> str:
        changed = overlay(folder / model / "changed", bases[model], _changed(bases[model], **case))
        opened, index = open_model(changed), changed / INDEX
        for name in json.loads(index.read_text())["weight_map"].values() if index.exists() else ():
            if not (changed / str(name)).resolve().is_relative_to(changed.resolve()):
                raise Fault("escape", f"the index names {name}, which lies outside")
        opened.describe()
        return ACCEPTED

    return run


def _in_two(base: Path) -> Path:
    """Divide the weights of a folder, put a part beside it, and return the folder."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    weight_map = {name: SHARDS[2 * place >= len(tensors)] for place, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, base / shard)
    (base.parent / _OUTSIDE).write_bytes((base / SHARDS[0]).read_bytes())
    total = sum(tensor.nbytes for tensor in tensors.values())
    (base / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return base


def _changed(base: Path, kind: str, file: str, changes: Any, place: int) -> dict[str, bytes | None]:
    """Return the files of a case that differ from the base, None for one that is absent."""
    data, index = (base / file).read_bytes(), (base / INDEX).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    ways = f"../{_OUTSIDE}", str(base.parent.resolve() / _OUTSIDE), f"./../{_OUTSIDE}", f"x/../../{_OUTSIDE}"
    match kind:
        case "index":
            return {INDEX: edits.mutated(index, changes)}
        case "header":
            header = edits.mutated(data[8:begin].rstrip(b" "), changes)
            return {file: len(header).to_bytes(8, "little") + header + data[begin:]}
        case "length":
            return {file: _LENGTHS[place % len(_LENGTHS)].to_bytes(8, "little") + data[8:]}
        case "damage":
            return {file: edits.mutated(data, changes)}
        case "swap":
            return dict(zip(SHARDS, [(base / shard).read_bytes() for shard in reversed(SHARDS)], strict=True))
        case "bin":
            return {INDEX: None, SHARDS[0]: None, SHARDS[1]: None, "pytorch_model.bin": b"PK"}
        case "out":
            return {INDEX: index.replace(f'"{SHARDS[0]}"'.encode(), json.dumps(ways[place % 4]).encode())}
    return {f"{file}/" if kind == "folder" else file: None}
