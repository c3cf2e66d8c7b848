"""Saves a prompt's cache pages to a file, and loads them into the prefix cache of any process with the same model.

The file is a safetensors file: the tokens, and every array of their pages as bytes. Its metadata state what the pages
depend on, and contain a checksum of all of it.
"""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from et_jax.decode import slots
from et_jax.decode.cache.eight_bits import dtype_name
from et_jax.decode.slots import Pages
from et_jax.errors import UsageError
from et_jax.io.files import expanded, replace_file
from et_jax.models.config import ModelConfig
from et_jax.models.fingerprint import weights_fingerprint
from et_jax.serve.replica import Replica, placed
from et_jax.serve.replicas import Replicas

_FORMAT = 1
_AGAIN = "save the prefix again"


class Prefix(NamedTuple):
    """The tokens of full pages, and the arrays of these pages, with leading axes head, layer of a stack, and page."""

    tokens: list[int]
    arrays: list[Shaped[np.ndarray, "k l n ..."]]


def save(path: str | Path, replicas: Replicas, prompt: list[int], depends: dict[str, Any]) -> int:
    """Write the cached prefix of a prompt to a file, and return its tokens. Raises UsageError if none is cached."""
    found = replicas.each(lambda replica: cached(replica, prompt))
    if (prefix := next((one for one in found if one is not None), None)) is None:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens, of which no chunk of {depends['chunk']} is cached; give a longer "
            "one, or save it while no other requests are served."
        )
    write(path, prefix, depends)
    return len(prefix.tokens)


def load(path: str | Path, replicas: Replicas) -> int:
    """Put the prefix in a file into the cache of every replica, and return its tokens. Raises as `read` and `enter`."""
    prefix = read(path, depends_on(replicas.replicas[0]))
    replicas.each(lambda replica: enter(replica, prefix))
    return len(prefix.tokens)


@placed()
def cached(replica: Replica, prompt: list[int]) -> Prefix | None:
    """Return the cached prefix of a prompt on a locked replica; None if there is none, or no slot is free."""
    pages, free = replica.pool.cached_prefix(prompt), replica.slots.free
    if not pages or not free:
        return None
    slot = free[0]
    replica.device.share(slot, pages)
    copies: list[Pages] = jax.device_get(replica.device.swap_out(slot, len(pages))[1])
    replica.device.release(slot)
    arrays = []
    for parts in zip(*map(_arrays, copies), strict=True):
        by_layer = [x.reshape(x.shape[0], depth, -1, *x.shape[2:]) for depth, x in parts]
        arrays.append(np.concatenate(by_layer, axis=2)[:, :, : len(pages)])
    return Prefix(prompt[: len(pages) * replica.config.page_size], arrays)


@placed()
def enter(replica: Replica, prefix: Prefix) -> None:
    """Put pages into the prefix cache of a locked replica. Raises UsageError if there are too few free pages."""
    tokens, free, device, pool = prefix.tokens, replica.slots.free, replica.device, replica.pool
    num_pages, together = pool.pages_for(len(tokens)), replica.config.pages_per_swap
    if len(tokens) >= (most := replica.config.max_length):
        raise UsageError(f"The prefix has {len(tokens)} tokens and max_model_len is {most}; raise that.")
    if not free or pool.num_available < num_pages:
        raise UsageError(
            f"The prefix takes {num_pages} pages of {max(pool.num_available, 0)} that are free, and a slot; load it "
            "before requests are served, or raise num_pages."
        )

    def part(x: Shaped[np.ndarray, "k l n ..."], first: int) -> Shaped[np.ndarray, "k m ..."]:
        found = x[:, :, first : first + together]
        padded = np.zeros((*found.shape[:2], together, *found.shape[3:]), found.dtype)
        padded[:, :, : found.shape[2]] = found
        return padded.reshape(len(x), -1, *x.shape[3:])

    slot, structure = free[0], jax.tree.structure(_shapes(replica))
    parts = [structure.unflatten([part(x, first) for x in prefix.arrays]) for first in range(0, num_pages, together)]
    pool.swap_in(slot, [*tokens, tokens[-1]], len(tokens), len(tokens))
    device.evict(pool.settle())
    device.fill(slot, len(tokens), parts)
    device.reference(pool.cache(slot, jax.device_get(device.state.table.pages)[slot].tolist()))
    pool.release(slot)
    device.release(slot)


def write(path: str | Path, prefix: Prefix, depends: dict[str, Any]) -> None:
    """Write a prefix, and what it depends on, to a file. Raises UsageError if it cannot be written."""
    tensors = {str(i): np.ascontiguousarray(x).reshape(-1).view(np.uint8) for i, x in enumerate(prefix.arrays)}
    tensors |= {"tokens": np.asarray(prefix.tokens, np.int32)}
    facts = json.dumps({"format": _FORMAT, "depends": depends})
    replace_file(expanded(path), serialized(tensors, {"facts": facts, "blake2b": _digest(facts, tensors)}))


def read(path: str | Path, depends: dict[str, Any]) -> Prefix:
    """Return the prefix in a file. Raises UsageError if it is damaged, or of another model or other settings."""
    path = place_of(path)
    try:
        with safe_open(path, "numpy") as reader:
            metadata = reader.metadata() or {}
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (no mapping)
        if _digest(metadata["facts"], tensors) != metadata["blake2b"]:
            raise ValueError("its digest differs")
        facts = json.loads(metadata["facts"])
        if facts["format"] != _FORMAT:
            raise UsageError(f"{path} is of format {facts['format']}, not {_FORMAT}; {_AGAIN}.")
        for name, wanted in depends.items():
            if (was := facts["depends"][name]) != wanted:
                raise UsageError(f"{path} was saved {_differing(name, was, wanted)}.")
        tokens, arrays = tensors["tokens"].tolist(), []
        for number, (dtype, lead, rest) in enumerate(depends["cache"]):
            shape = *lead, len(tokens) // depends["page_size"], *rest
            arrays.append(tensors[str(number)].view(np.dtype(dtype)).reshape(shape))
    except UsageError:
        raise
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged, or no saved prefix; {_AGAIN}.") from error
    return Prefix(tokens, arrays)


def place_of(path: str | Path) -> Path:
    """Return the path of a saved prefix. Raises UsageError if there is no file."""
    if not os.path.isfile(place := expanded(path)):
        raise UsageError(f"{path} is no file; name one that --save-prefix, or model.save_prefix, wrote.")
    return place


def _differing(name: str, was: Any, wanted: Any) -> str:
    """Return a phrase for an error message: what differs from the saved prefix, and what to do."""
    if name == "model":
        return f"with another model, adapter or dtype; {_AGAIN} with this one"
    if name == "cache":
        return f"by a control or version that stores other pages; load it under that one, or {_AGAIN}"
    return f"with {name} {was}, and here it is {wanted}; load the model so, or {_AGAIN}"


def depends_on(replica: Replica) -> dict[str, Any]:
    """Return everything that the pages of a prompt depend on, as values of JSON.

    These are the weights, how they are run, and the arrays of a page; not the number of sequences. Raises UsageError
    if the replica has no prefix cache.
    """
    if not replica.pool.has_prefix_cache:
        raise UsageError(
            "Prompts are not cached with prefix_cache=False, lazy_prefill, a prefill budget or this control."
        )
    config, model = replica.config, hashlib.blake2b(digest_size=16)
    for each, weights in zip(config.models, replica.device.weights, strict=True):
        described = repr(each) if isinstance(each, ModelConfig) else each.architecture
        model.update(f"{described} {weights_fingerprint(weights)}\n".encode())
    return {
        "model": model.hexdigest(),
        "platform": jax.default_backend(),
        "backend": config.backend,
        "tensor_parallel": 1 if config.mesh is None else config.mesh.size,
        "page_size": config.page_size,
        "chunk": config.chunk,
        "cache_dtype": dtype_name(config.cache_dtype),
        "cache": [[x.dtype.name, [x.shape[0], depth], list(x.shape[2:])] for depth, x in _arrays(_shapes(replica))],
    }


def _shapes(replica: Replica) -> Pages:
    """Return the shapes of the arrays of a page copy."""
    read_pages = partial(slots.read_pages, replica.config)
    return jax.eval_shape(read_pages, replica.device.state, np.int32(0), np.int32(0))


def _arrays(pages: Pages) -> list[tuple[int, Any]]:
    """Return the arrays of pages, each with its number of layers."""
    return [(place.depth, x) for cache in pages for place in cache.layers for x in jax.tree.leaves(place)]


def _digest(facts: str, tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.data)
    return digest.hexdigest()
