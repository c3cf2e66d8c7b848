"""A module of the caller's own: called as it is, with another attention in the place of its own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_modules import Plain, Wrapped, causal, own_logits

from et_jax.errors import UsageError
from et_jax.models.module import ModuleConfig, forward
from et_jax.models.module_reading import read_module

pytestmark = pytest.mark.usefixtures("hardly_optimised")

VOCABULARY = 61
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24))
CONFIG = ModuleConfig(max_positions=96)


def attend(layer, q, k, v, memory, softmax):
    """Plain attention, and the numbers of the layers so far for its memory."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return causal(q, k, v), jnp.append(memory, layer)


@pytest.mark.parametrize(("kind", "num_layers"), [(Plain, 2), (Wrapped, 4)])
def test_with_plain_attention_it_is_the_module_itself_which_stays_as_it_was(kind, num_layers):
    module = kind(VOCABULARY, rngs=nnx.Rngs(1))
    before = nnx.split(module)
    found, weights = read_module(module, CONFIG)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    run = jax.jit(lambda w, t: forward(w, found, t, positions, attend, jnp.zeros(0, jnp.int32)))
    logits, layers = run(weights, jnp.asarray(TOKENS))
    after = nnx.split(module)
    assert after[0] == before[0]
    assert all(one is other for one, other in zip(*map(jax.tree.leaves, (before[1], after[1])), strict=True))
    assert logits.dtype == jnp.float32 and layers.tolist() == [*range(num_layers)]
    for row, tokens in zip(logits, TOKENS, strict=True):
        own = own_logits(module, tokens)
        assert own.std() > 0.1
        np.testing.assert_allclose(row, own, rtol=0, atol=1e-5 * np.abs(own).max())


def config_of(**fields) -> ModuleConfig:
    """A config that is made where no types are checked but its own."""
    made = ModuleConfig.__new__(ModuleConfig)
    for name, value in (vars(CONFIG) | fields).items():
        object.__setattr__(made, name, value)
    made.__post_init__()
    return made


def test_a_config_takes_ids_of_any_kind_and_refuses_the_rest_when_it_is_made():
    odd = ["x", b"x", 1.5, True, math.nan, -1, 2**31, 10**400, [[1]], object(), ("x",), [2**31], [None], {-1}]
    fields = {"max_positions": [None, 1, 0, ()], "bos_token_id": [(1,)], "eos_token_ids": [0, 5], "calibration": []}
    for name, more in fields.items():
        for value in [*odd, *more]:
            with pytest.raises(UsageError) as refusal:
                config_of(**{name: value})
            said = str(refusal.value)
            assert name in said and said.endswith(".") and "\n" not in said, (name, value)
    assert config_of(calibration=None) == CONFIG
    with pytest.raises(UsageError, match=r"^max_positions is 1; it must be at least 2\.$"):
        ModuleConfig(max_positions=1)
    found = config_of(bos_token_id=np.int64(3), eos_token_ids=np.array([1, 2]))
    assert (found.bos_token_id, found.eos_token_ids) == (3, (1, 2)) and type(found.bos_token_id) is int
    assert [config_of(eos_token_ids=ids).eos_token_ids for ids in ({7}, (), [5], range(2))] == [(7,), (), (5,), (0, 1)]
