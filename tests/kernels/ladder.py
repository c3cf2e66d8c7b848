"""What the tests of every kernel share: one compiled program a function and its settings, and results as NumPy arrays.

The settings of the softmax travel with the arrays, so shapes that differ in arrays or softmax alone share a program's
entry here and are compiled by it once each, however many tests of a module ask.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# rounding of one value, times a few for the sums: relative to outputs of size one
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}
LSE_TOLERANCE = 2e-5  # scores are float32 products of either dtype; log-sum-exps reach 10
CAP = 1.5  # of the scores of codes, a third of which are larger


def absent(kind: str, platform: str) -> jax.sharding.AbstractMesh:
    """A mesh of one device that is not here."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)
    return jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)


HOPPER, TPU = absent("NVIDIA H200", "cuda"), absent("TPU v5 lite", "tpu")


@functools.cache
def compiled(function: Callable[..., Any], **settings: Any) -> Any:
    """The function with its settings bound, compiled once for each shape of its arrays."""
    return jax.jit(lambda arrays: function(**arrays, **settings))


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of an example that a function takes."""
    names = inspect.signature(function).parameters
    return {name: x for name, x in arguments.items() if name in names}


def results(function: Callable[..., Any], arguments: dict[str, Any], **settings: Any) -> Any:
    """What a function returns, as numpy in its own dtypes; None stays None."""
    return jax.tree.map(np.asarray, compiled(function, **settings)(taken(function, arguments)))


def lowered_for_cuda(program: Any, *arguments: Any) -> str:
    """The text of a compiled function for a GPU that is not here, with nothing but jaxlib."""
    with jax.sharding.use_abstract_mesh(HOPPER):
        return program.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def numbers(tree: Any) -> Any:
    """The same as float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def as_bytes(tree: Any) -> Any:
    """The same as bytes, so that equal means equal to the last bit."""
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), tree)


def with_nan_unseen(arguments: dict[str, Any], seen: Any, width: int) -> dict[str, Any]:
    """The same pool with NaN in all tokens but those `seen` "k p s", and in their columns from `width` on.

    8 bits have their least there, and NaN in the scales of tokens that are not seen.
    """
    pages, scales = np.array(arguments["pages"]), arguments["kv_scales"]
    poison = np.nan
    if scales is not None:
        poison = np.asarray(-128 if pages.dtype == np.int8 else -448.0).astype(pages.dtype)
        scales = np.where(seen[:, :, None], scales, np.float32(np.nan))
    pages[~seen] = poison
    pages[..., width:] = poison
    return arguments | {"pages": pages, "kv_scales": scales}
