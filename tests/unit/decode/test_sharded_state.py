"""What a decoder holds, split by heads as its fields say; what goes with no mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from small_model import PAGE, configuration

from et_jax.control.presets import preset
from et_jax.decode.sharded import split
from et_jax.decode.state import empty
from et_jax.types import replace

ALONE = Mesh(np.array(jax.devices()[:1]), ("tp",))
BUDGETED = preset("entropyinfer", prefill_budget=16)
assert BUDGETED.budget is not None
SHARED = replace(BUDGETED, budget=replace(BUDGETED.budget, shared=True))
SEGMENT = -(-BUDGETED.budget.segment // PAGE) * PAGE


def test_scales_of_8_bits_are_split_by_heads_and_what_has_none_by_nothing():
    config = configuration(keep=frozenset({"surprisals"}), cache_dtype=jnp.int8, dtype=jnp.float32)
    state = jax.eval_shape(partial(empty, config))
    specs = split(state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    cache = specs.plants[0].cache
    assert cache.layers[1].kv_scales == P("tp", None, None, None)
    assert "tp" not in cache.surprisal and "tp" not in specs.table.pages
    assert split((jnp.zeros(4), None)) == (P(), None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"controller": SHARED, "chunk": SEGMENT, "prefill_batch": SEGMENT}, "a budget that compares heads"),
    ],
)
def test_what_is_not_served_over_a_mesh_is_refused(changes, told):
    configuration(**changes)
    with pytest.raises(ValueError, match=f"mesh: got one with {told}, wanted"):
        configuration(mesh=ALONE, **changes)
