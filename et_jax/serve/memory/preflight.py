"""The memory that a decoder requires, before any weight is read: bytes of weights, pages, state and a step.

All of it follows from the configuration. Weights, pages and state are computed from shapes; only the temporaries of a
step are an estimate, see `step_bytes`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from et_jax.decode.cache.kv import token_bytes
from et_jax.decode.config import DecoderConfig
from et_jax.decode.sharded import split
from et_jax.decode.state import empty
from et_jax.errors import UsageError
from et_jax.models import sharding
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.model import token_numbers, weight_bytes
from et_jax.models.module import ModuleModel
from et_jax.pallas.checks import EIGHT_BITS, wider
from et_jax.pallas.paged_attention import api as paged_attention
from et_jax.pallas.paged_prefill import api as paged_prefill
from et_jax.types import replace

# Float32 copies of the logits alive at once; XLA on a CPU allocates 8 and 2.2.
_STEP_LOGITS, _DRAFT_LOGITS, _PREFILL_LOGITS = 12, 3, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes by purpose, and the number of cache pages that fit.

    `page` is a page of every layer with its summaries and codes. `state` is the decoder's state without its pages.
    `step` is the temporary memory of a step. `memory` is the total that may be used. Over several devices these are
    bytes per device. With `wanted_pages` every slot can reach its full length; `num_pages` fit, including page 0. Each
    of the `replicas` of a device has its own state, step and cache.
    """

    weights: int
    page: int
    state: int
    step: int
    memory: int
    wanted_pages: int
    num_pages: int
    replicas: int = 1

    @property
    def cache(self) -> int:
        """Bytes of a replica's cache."""
        return self.num_pages * self.page

    @property
    def total(self) -> int:
        """Bytes in total."""
        return self.weights + self.replicas * (self.state + self.step + self.cache)

    def table(self) -> list[str]:
        """Return the plan as readable lines."""
        short = "" if self.num_pages >= self.wanted_pages else f", of {self.wanted_pages} for every sequence at once"
        shared = "" if self.replicas == 1 else f"with {self.replicas} replicas, "
        rows = [
            ("weights", self.weights, ""),
            ("cache", self.cache, f"{self.num_pages} pages of {size_text(self.page)}{short}"),
            ("state", self.state, ""),
            ("step", self.step, "estimated"),
            ("in all", self.total, f"{shared}of {size_text(self.memory)} that may be used"),
        ]
        return [f"{name:8} {size_text(size):>10}  {remark}".rstrip() for name, size, remark in rows]


def plan(config: DecoderConfig, memory: int, *, num_pages: int | None = None, replicas: int = 1) -> Plan:
    """Return the plan of `replicas` decoders of this configuration in `memory` bytes that they share.

    With `num_pages` None the cache has pages for every slot's full length, or as many as fit; `config.num_pages` is
    ignored. Raises UsageError, with changes that would fit, if not even one sequence of full length fits.
    """
    found = _measure(config, memory, num_pages, replicas)
    if found.total > memory:
        raise UsageError(_refusal(config, found, num_pages))
    return found


def _measure(config: DecoderConfig, memory: int, num_pages: int | None, replicas: int) -> Plan:
    """Return the plan with `num_pages` pages, or as many as fit, at least those of a full-length sequence."""
    weights, step = sum(_weight_bytes(config, model) for model in config.models), step_bytes(config)
    page, state = decoder_bytes(config)
    wanted = config.num_slots * config.blocks_per_slot + 1
    if num_pages is None:
        fitting = ((memory - weights) // replicas - state - step) // page
        num_pages = max(min(wanted, fitting), config.blocks_per_slot + 1)
    return Plan(
        weights=weights,
        page=page,
        state=state,
        step=step,
        memory=memory,
        wanted_pages=wanted,
        num_pages=num_pages,
        replicas=replicas,
    )


def decoder_bytes(config: DecoderConfig) -> tuple[int, int]:
    """Return the bytes of a page, and those of a decoder's state without its pages."""
    three, five = (_state_bytes(replace(config, num_pages=number)) for number in (3, 5))  # odd: both padded or neither
    page = (five - three) // 2
    return page, three - 3 * page


def _state_bytes(config: DecoderConfig) -> int:
    state = jax.eval_shape(partial(empty, config))
    if config.mesh is None:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return sum(jax.tree.leaves(jax.tree.map(partial(sharding.local_bytes, config.mesh), state, split(state))))


def _weight_bytes(config: DecoderConfig, model: ModelShape) -> int:
    """Return the bytes of a model's weights on each device."""
    if config.mesh is None or not isinstance(model, ModelConfig):
        return weight_bytes(model, config.weights_dtype, config.quantize)
    return sharding.bytes_of_chip(model, config.mesh, config.weights_dtype, config.quantize)


def step_bytes(config: DecoderConfig) -> int:
    """Return an upper estimate of the temporary bytes of a decode step or a prefill chunk.

    In float32: twelve copies of a step's logits and three of those of drafted tokens, or three of a chunk's if the
    configuration keeps logits; for each token the activations of a layer (`token_numbers`), and two copies of queries,
    keys and values; four numbers per row, query head and block for block selection. The workspace of the attention
    kernels is added. A compression runs between steps, so the larger of both counts.
    """
    c, rows = config.model, _most_rows(config)
    tokens = max(rows, config.prefill_batch)
    of_step = _STEP_LOGITS * config.batch + _DRAFT_LOGITS * (rows - config.batch)
    vocabulary = c.vocab_size if config.mesh is None else c.vocab_size // config.mesh.size
    logits = vocabulary * max(of_step, _PREFILL_LOGITS * config.prefill_batch * ("logits" in config.keeps))
    heads = 2 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    token = token_numbers(c) + heads
    choice = 4 * rows * c.num_heads * config.blocks_per_slot
    step = 4 * (logits + tokens * token + choice) + _attention_bytes(config)
    return max(step, _compression_bytes(config))


def _compression_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a compression: a layer's tokens of a slot twice, all regions, a head's scores thrice."""
    how, layout, c = config.compression, config.layout, config.model
    if how is None or layout is None:
        return 0
    tokens, kept = config.blocks_per_slot * config.page_size, c.num_layers * layout.region * config.page_size
    token = c.num_kv_heads * token_bytes(c.head_dim, config.cache_dtype)
    return token * (2 * tokens + kept) + 4 * 3 * how.window * c.group_size * tokens


def _attention_bytes(config: DecoderConfig) -> int:
    """Return the workspace of attention in a step or in a chunk of prefill, the larger of each kind."""
    c = config.model
    shape = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
    shape |= {"page_size": config.page_size}
    dtype = wider(config.weights_dtype, config.cache_dtype)
    decoding = paged_attention.workspace(rows=_most_rows(config), **shape, dtype=dtype)
    prefill = paged_prefill.workspace(rows=config.prefill_batch // config.chunk, chunk=config.chunk, **shape)
    return max(decoding.scores, prefill.scores) + max(decoding.gathered, prefill.gathered)


def _most_rows(config: DecoderConfig) -> int:
    """Return the most rows of a step, including drafted tokens."""
    return config.batch if config.draft is None else config.draft.widths(config.batch)[-1]


def _refusal(config: DecoderConfig, found: Plan, num_pages: int | None) -> str:
    """Return the error message: the memory required, the memory available, and changes that each suffice."""
    dtype = config.quantize or jnp.dtype(config.weights_dtype).name
    caches = "the cache" if num_pages else f"the cache of one sequence of {config.max_length} tokens"
    times = "" if found.replicas == 1 else f", for each of {found.replicas} replicas"
    said = (
        f"This needs {size_text(found.total)} and {size_text(found.memory)} may be used: "
        f"{size_text(found.weights)} for weights in {dtype}, {size_text(found.cache)} for {caches}, "
        f"{size_text(found.state + found.step)} for {config.num_slots} sequences at once{times}"
    )
    remedies = list(_remedies(config, found, num_pages)) or [
        f"choose a model of at most {found.memory // (4 * 10**9)} billion weights in bfloat16, or a larger machine"
    ]
    return f"{said}; {', or '.join(remedies)}."


def _remedies(config: DecoderConfig, found: Plan, num_pages: int | None) -> list[str]:
    def fits(changed: DecoderConfig, pages: int | None = num_pages) -> bool:
        return _measure(changed, found.memory, pages, found.replicas).total <= found.memory

    def with_slots(number: int) -> DecoderConfig:
        return replace(config, num_slots=number, batch=min(number, config.batch))

    def with_length(number: int) -> DecoderConfig:
        return replace(config, max_length=number)

    remedies = []
    if found.replicas > 1 and _measure(config, found.memory, num_pages, 1).total <= found.memory:
        remedies.append("take fewer replicas")
    if num_pages is not None and fits(config, None):
        remedies.append(f"take num_pages {_measure(config, found.memory, None, found.replicas).num_pages}")
    half, of_one_dtype = jnp.bfloat16, isinstance(config.model, ModuleModel)
    if not of_one_dtype and _is_wide(config.weights_dtype) and fits(replace(config, dtype=half, cache_dtype=half)):
        remedies.append("take bfloat16")
    if _is_wide(config.cache_dtype) and fits(replace(config, dtype=config.weights_dtype, cache_dtype=half)):
        remedies.append("take cache_dtype bfloat16")
    if not of_one_dtype and config.quantize is None and fits(replace(config, quantize="int8")):
        remedies.append("take quantize int8")
    if jnp.dtype(config.cache_dtype) not in EIGHT_BITS and fits(
        replace(config, dtype=config.weights_dtype, cache_dtype=jnp.int8)
    ):
        remedies.append("take cache_dtype int8")
    if fits(with_slots(2)):
        remedies.append(f"take max_num_seqs {_largest(lambda n: fits(with_slots(n)), 2, config.num_slots)}")
    if num_pages is None and fits(with_length(config.prefill_batch)):
        remedies.append(
            f"take max_model_len {_largest(lambda n: fits(with_length(n)), config.prefill_batch, config.max_length)}"
        )
    return remedies


def _is_wide(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize > 2


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number that fits, by bisection; `low` fits, `high` does not, and `fits` is monotone."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def size_text(size: int) -> str:
    """Return a number of bytes as readable text, in powers of ten."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size} bytes"
