"""A row of a step has the same bits however many rows stand beside it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hurry import hurried
from small_model import MODEL, configuration, prompt, same_bits, start

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.select import TopBlocks
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.decode import decoder as decoding
from et_jax.decode.state import empty
from et_jax.decode.step import step
from et_jax.models.calibration import Calibration
from et_jax.models.transformer import initialise
from et_jax.models.weights import quantized
from et_jax.pallas.paged_attention import paged_attention, xla
from et_jax.types import Table, replace
from scripts.measuring.kernel_shapes.paged_attention import Shape, example

# Wide enough that sums over 2 rows are small to XLA, and those over 18 rows are not.
SIZES = {"vocab_size": 2093, "hidden_size": 256, "intermediate_size": 320}
WIDE = dataclasses.replace(MODEL, num_layers=1, windows=(None,), num_heads=6, num_kv_heads=2, head_dim=32, **SIZES)
SLIDING = dataclasses.replace(WIDE, num_layers=2, head_dim=64, windows=(6, None), vocab_size=500)
LONE = dataclasses.replace(WIDE, head_dim=128, num_heads=4, num_kv_heads=1)
LAWS = {
    "off": Controller(law=chain(EmaEntropy(), FallClock())),
    "blocks": Controller(selector=TopBlocks(), law=Constant(0.7), residual=True),
    "certified": preset("certified", min_context=20),  # others read all
}
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "typical_p": 0.9, "top_h": 0.9, "eta_cutoff": 0.01},
)
MANY = (2, 18, 144)  # over borders at which XLA multiplies and adds in another way


@functools.cache
def full(model, dtype, control: str, rows: int, quantize: str | None = None, cache_dtype=None):
    """A decoder of so many rows, weights, and a state in which every slot has a prompt and settings of its own."""
    sensitivity = np.linspace(0.1, 2.0, model.num_layers * model.num_heads, dtype=np.float32)
    sensitivity = sensitivity.reshape(model.num_layers, model.num_kv_heads, model.group_size)
    sizes = {"num_slots": rows, "batch": rows, "num_pages": 16 * rows + 7}
    dtypes = {"cache_dtype": cache_dtype or dtype, "dtype": dtype}
    laws = {"controller": LAWS[control], "calibration": Calibration(sensitivity=Table(sensitivity))}
    config = configuration(model=model, penalties=True, keep=frozenset({"logits"}), **sizes, **dtypes, **laws)
    params = initialise(model, jax.random.key(0), dtype)
    params = jax.tree.map(lambda x: x * jnp.asarray(4 if x.ndim > 1 else 1, dtype), params)
    if quantize is not None:
        params = quantized(params, dtype)
    with hurried():  # of the programs of this module only the step has bits to compare
        d = decoding.decoder(config)
        state = d.empty()
        for slot in range(rows):
            tokens, asked = prompt(slot, 3 + 7 * slot % 40), SETTINGS[slot % len(SETTINGS)]
            state = start(d, params, state, slot, tokens, seed=slot, **asked)
    return config, params, state


def first_rows(config, state, rows: int):
    """The configuration and the state of the first rows alone, over the same pages."""
    config = dataclasses.replace(config, num_slots=rows, batch=rows)
    shapes = jax.eval_shape(functools.partial(empty, config))
    return config, jax.tree.map(lambda x, like: x if x.shape == like.shape else x[:rows], state, shapes)


def after_steps(config, params, state, steps: int = 3, **settings):
    """The state, and the last output."""
    advance = jax.jit(functools.partial(step, config, **settings))
    for _ in range(steps):
        state, output = advance((params,), state)
    return state, output


def of_first(state, output, rows: int):
    """All that the first rows came to, and the pages that these hold."""
    pages = np.concatenate([state.table.pages[row, : state.table.num_blocks[row]] for row in range(rows)])
    output = jax.tree.map(lambda x: x[0], output)  # steps of one token
    told = {name: x for name, x in vars(state).items() if name not in ("plants", "table")} | {"output": output}
    of_rows = jax.tree.map(lambda x: x[:rows], told)
    return of_rows, jax.tree.map(lambda x: x[:, pages], state.plants[0].cache.layers)


def differing(one, other) -> list[str]:
    """The places at which the bits of two trees differ."""
    leaves = zip(*map(jax.tree_util.tree_leaves_with_path, (one, other)), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), (_, y) in leaves if not same_bits(x, y)]


@pytest.mark.parametrize(
    ("model", "dtype", "control", "counts", "in_8_bits"),
    [
        (WIDE, jnp.float32, "off", MANY, {}),
        (LONE, jnp.bfloat16, "blocks", (2, 17, 144), {"quantize": "int8", "cache_dtype": jnp.int8}),
        (SLIDING, jnp.bfloat16, "certified", (2, 144), {}),
    ],
)
def test_a_row_has_the_same_bits_among_any_number(model, dtype, control, counts, in_8_bits):
    """The first rows among the most have the bits that they have among fewer."""
    config, params, state = full(model, dtype, control, counts[-1], **in_8_bits)
    most = after_steps(config, params, state)
    for rows in counts[:-1]:
        few, own = first_rows(config, state, rows)
        alone, among = of_first(*after_steps(few, params, own), rows), of_first(*most, rows)
        # the weights' bytes are shared out among the rows
        assert [name for name in differing(alone, among) if "cost" not in name] == [], rows


@pytest.mark.parametrize(
    ("model", "dtype", "control"), [(WIDE, jnp.float32, "off"), (SLIDING, jnp.bfloat16, "certified")]
)
def test_sequences_have_the_same_bits_where_a_step_has_rows_for_few(model, dtype, control):
    """In slots of any number, at the same price, for the laws may go by that."""
    config, params, state = full(model, dtype, control, MANY[-1])  # made above
    running = jnp.isin(jnp.arange(MANY[-1]), jnp.asarray([3, 11]))
    state = replace(state, active=running)
    (state, output), few = (after_steps(config, params, state, num_rows=number) for number in (None, 2))
    assert output.produced[0].tolist() == running.tolist()
    assert differing(state, few[0]) == []
    assert differing(*(jax.tree.map(lambda x: x[:, running], one) for one in (output, few[1]))) == []


def test_short_sequences_have_the_same_bits_where_no_step_chooses_blocks():
    config, params, state = full(SLIDING, jnp.bfloat16, "certified", MANY[-1])  # made above
    never = jax.tree.map(lambda x: jnp.full_like(x, 2**20), state.laws.min_context)
    state = replace(state, laws=replace(state.laws, min_context=never))
    whole, other = (after_steps(config, params, state, chooses=chooses) for chooses in (True, False))
    assert whole[1].produced.all() and not whole[1].signals.summaries_read.any()
    assert differing(whole, other) == []


def folded(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, page_size: int = 16, **rest) -> Shape:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    return Shape(name="", page_size=page_size, lengths=(), **shape, **rest)


FOLDED = {
    "bfloat16": (folded(4, 2, 64, "bfloat16"), 9),
    "keys apart": (folded(8, 2, 128, "bfloat16", page_size=64), 17),
    "three queries": (folded(9, 3, 64, "float32"), 5),
    "window": (folded(4, 2, 64, "bfloat16", window=140, soft_cap=4.0, sinks=True), 3),
    "int8": (folded(4, 2, 128, "bfloat16", in_8_bits="int8"), 5),
    "fp8": (folded(9, 3, 64, "float32", in_8_bits="float8_e4m3fn"), 5),
}


@pytest.mark.parametrize(
    ("name", "room"), [*((name, xla.ROUND) for name in FOLDED), ("bfloat16", 4), ("three queries", 4)]
)
def test_rows_of_a_slot_have_the_bits_of_rows_that_stand_alone(name, room, monkeypatch):
    """Over page and group borders, in lists of one round and of several, some rows or all of a slot not running.

    What lies behind a slot's longest row is NaN.
    """
    monkeypatch.setattr(xla, "ROUND", room)
    shape, rows = FOLDED[name]
    newest = np.array([1, 14, 120, 126, 250, 700, 1020, 33, 800, 1100, 0])
    lengths = newest[:, None] + np.arange(rows)
    lengths[3, rows // 2 :] = 0
    lengths[-1] = 0
    longest = lengths.max(axis=1)
    slots = example(dataclasses.replace(shape, lengths=tuple(longest.tolist())))
    if not shape.in_8_bits:
        pages = np.array(slots["pages"])
        pages[:, 0] = np.nan
        for length, own in zip(longest, np.asarray(slots["page_table"]), strict=True):
            pages[:, own[-(-length // shape.page_size) :]] = np.nan
            if length % shape.page_size:
                pages[:, own[length // shape.page_size], length % shape.page_size :] = np.nan
        slots["pages"] = jnp.asarray(pages)
    rng = np.random.default_rng(1)
    slots["q"] = jnp.asarray(rng.normal(size=(lengths.size, shape.num_heads, shape.head_dim)), shape.dtype)
    slots["lengths"] = jnp.asarray(lengths.reshape(-1), jnp.int32)
    softmax = slots.pop("softmax")

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def attended(arguments, rows_per_slot: int, num_outputs: int):
        both = paged_attention(**arguments, softmax=softmax, rows_per_slot=rows_per_slot, backend="xla")
        return both[:num_outputs]  # block sums that nobody reads are not worked out, as in a dense layer

    shared = ("page_table", "blocks", "counts")
    alone = slots | {key: jnp.repeat(slots[key], rows, axis=0) for key in shared}
    expected = attended(alone, 1, 2)
    assert same_bits(attended(slots, rows, 2), expected)
    assert same_bits(attended(slots, rows, 1), expected[:1])
    for first in range(0, lengths.size - 1, 2):
        two = alone | {key: alone[key][first : first + 2] for key in ("q", "lengths", *shared)}
        assert same_bits(attended(two, 1, 1)[0], expected[0][first : first + 2])
