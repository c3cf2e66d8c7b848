"""Filters on what a law sees, against sums over the whole history."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.base import ControlState, Signals
from et_jax.control.smoothing import EmaEntropy

WHOLE = {"blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "pages_held", "wait"}
TOKENS = 20


def rows(cls, **given):
    """A `cls` of one row per entry of what is given, zeros elsewhere."""
    size = len(next(iter(given.values())))
    plain = {f.name: np.zeros(size, np.int32 if f.name in WHOLE else np.float32) for f in dataclasses.fields(cls)}
    if cls is ControlState:
        plain |= {"prompt": None, "block_mass": None, "notes": {}, "block_mask": np.zeros((size, 1, 1, 1), np.uint32)}
    return cls(**jax.tree.map(jnp.asarray, plain | given))


@partial(jax.jit, static_argnums=2)
def walk(state: ControlState, seen: Signals, decay: float) -> jax.Array:
    def one(state, token):
        state = EmaEntropy(decay)(token, state)
        return state, state.entropy

    return jax.lax.scan(one, state, seen)[1]


def filtered(decay: float, entropies: list[float], left_over: float = 0.0) -> list[float]:
    """The filter's state after every token of a sequence whose slot held `left_over` before."""
    series = np.zeros(TOKENS, np.float32)
    series[: len(entropies)] = entropies
    seen = rows(Signals, entropy=series, generated=np.arange(1, TOKENS + 1, dtype=np.int32))
    state = jax.tree.map(lambda x: x[0], rows(ControlState, entropy=np.float32([left_over])))
    return walk(state, seen, decay).tolist()[: len(entropies)]


series = st.lists(st.floats(0, 12, width=32, allow_subnormal=False), min_size=1, max_size=TOKENS)


@settings(max_examples=50)
@given(entropies=series, decay=st.sampled_from([0.0, 0.3, 0.9, 0.999]))
def test_the_average_weighs_the_past_by_powers_of_the_decay(entropies, decay):
    """Unrolled: e_t = decay^(t-1) H_1 + (1 - decay) sum_{i>=2} decay^(t-i) H_i; the weights sum to 1."""
    t = len(entropies)
    weights = np.array([decay ** (t - i) * (1 if i == 1 else 1 - decay) for i in range(1, t + 1)])
    assert abs(weights.sum() - 1) < 1e-9
    np.testing.assert_allclose(filtered(decay, entropies)[-1], weights @ np.asarray(entropies), rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(entropies=series)
def test_without_memory_it_is_the_entropy_itself_and_what_a_slot_held_before_is_forgotten(entropies):
    assert filtered(0.0, entropies) == entropies
    assert filtered(0.9, entropies, left_over=7.0) == filtered(0.9, entropies)


def test_it_lies_between_the_least_and_the_greatest_and_stays_on_a_constant():
    np.testing.assert_allclose(filtered(0.9, [2.5] * TOKENS), 2.5, rtol=1e-6)
    wild = filtered(0.5, [0.0, 10.0] * 5)
    assert min(wild) >= 0 and max(wild) <= 10


def test_each_row_has_its_own():
    seen = rows(Signals, entropy=np.float32([1, 3]), generated=np.int32([2, 1]))
    state = rows(ControlState, entropy=np.float32([3, 5]))
    np.testing.assert_array_equal(jax.vmap(EmaEntropy(0.5))(seen, state).entropy, [2, 3])
