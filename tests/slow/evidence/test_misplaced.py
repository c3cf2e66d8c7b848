"""Entropies at the wrong place: of another sequence or in another order, and what a law is shown."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.base import ControlState, Signals
from et_jax.control.priority import EntropyDrift
from et_jax.evidence import misplaced
from et_jax.types import replace

# Every value is of one sequence alone, and tells its place.
ENTROPIES = [100.0 * i + np.arange(length) for i, length in enumerate([3, 1, 7, 4, 5])]


@pytest.mark.parametrize("seed", range(20))
def test_each_is_told_those_of_another_in_their_order(seed):
    told = misplaced.of_others(ENTROPIES, np.random.default_rng(seed))
    sources = []
    for i, (own, given) in enumerate(zip(ENTROPIES, told, strict=True)):
        source = int(given[0]) // 100
        sources.append(source)
        assert source != i
        np.testing.assert_array_equal(given, [ENTROPIES[source][t % len(ENTROPIES[source])] for t in range(len(own))])
    assert sorted(sources) == [0, 1, 2, 3, 4]


def test_each_is_told_its_own_in_another_order():
    told = misplaced.reordered(ENTROPIES, np.random.default_rng(0))
    for own, given in zip(ENTROPIES, told, strict=True):
        np.testing.assert_array_equal(np.sort(given), own)
    assert any(list(own) != list(given) for own, given in zip(ENTROPIES, told, strict=True))


def zeros(kind):
    """A zero for every field that is an array, of its own dtype."""
    dtypes = {"Float": jnp.float32, "Int": jnp.int32, "UInt32": jnp.uint32}
    named = {field.name: getattr(field.type, "__name__", "").partition("[")[0] for field in dataclasses.fields(kind)}
    shapes = {"block_mask": (1, 1, 1)}
    return {name: jnp.zeros(shapes.get(name, ()), dtypes[of]) for name, of in named.items() if of in dtypes}


def test_a_law_follows_what_it_is_told_and_nothing_else():
    """Its running mean of the falls is that of the entropies told; the last one stands for those that are missing."""
    told = [4.0, 3.0, 0.5]
    law = misplaced.Told(EntropyDrift(0.8), jnp.asarray(told, jnp.float32))
    state = law.init(ControlState(**zeros(ControlState) | {"notes": {}, "prompt": None}))
    signals = Signals(**zeros(Signals))
    mean = 0.0
    for token, fall in enumerate([None, 1.0, 2.5, 0.0, 0.0]):
        state = law(replace(signals, entropy=jnp.float32(-7.0 * token), generated=jnp.int32(token + 1)), state)
        mean = mean if fall is None else 0.8 * mean + 0.2 * fall
        np.testing.assert_allclose(state.notes["entropy_drift"].mean, mean, rtol=1e-6)
        assert state.notes["entropy_drift"].entropy == told[min(token, 2)]
