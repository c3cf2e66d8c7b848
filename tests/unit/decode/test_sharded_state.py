"""What a decoder holds, split by heads as its fields say; what goes with no mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from small_model import OTHER, PAGE, configuration

from et_jax.control.compression import named
from et_jax.control.presets import preset
from et_jax.decode.draft import Drafting
from et_jax.decode.sharded import split
from et_jax.decode.state import empty
from et_jax.softmax import Softmax

ALONE = Mesh(np.array(jax.devices()[:1]), ("tp",))
BUDGETED = preset("entropyinfer", prefill_budget=16)
assert BUDGETED.budget is not None
SEGMENT = -(-BUDGETED.budget.segment // PAGE) * PAGE


def test_a_state_is_split_by_its_heads_and_in_nothing_else():
    keep = frozenset({"surprisals", "logits"})
    config = configuration(controller=preset("certified"), keep=keep, cache_dtype=jnp.int8, dtype=jnp.float32)
    state = jax.eval_shape(partial(empty, config))
    specs = split(state)
    split_ones = {
        jax.tree_util.keystr(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs) if "tp" in spec
    }
    pages = P("tp", None, None, None)
    cache = {
        ".pages": pages,
        ".summary.key_box": P("tp", None, None),
        ".summary.mean": P("tp", None, None),
        ".summary.value_radius": P("tp", None),
        ".key_codes": P("tp", None, None),
        ".kv_scales": pages,
    }
    assert split_ones == {".control.block_mask": P(None, None, "tp", None)} | {
        f".plants[0].cache.layers[{layer}]{name}": spec for layer in range(2) for name, spec in cache.items()
    }
    assert jax.tree.structure(specs) == jax.tree.structure(state)

    state = jax.eval_shape(partial(empty, configuration(controller=preset("paper"))))
    assert split(state).control.block_mass == P(None, None, "tp", None)  # of query heads
    assert split(Softmax(scale=1.0, sink_logits=jnp.zeros(4))).sink_logits == P("tp")
    assert split((jnp.zeros(4), None)) == (P(), None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"draft": Drafting(most=3)}, "draft"),
        ({"draft": Drafting(most=3, drafter=None), "others": (OTHER,)}, "draft and others"),
        ({"compression": named("latent", 16, window=6, gap=3)}, "compression"),
        ({"quantize": "int8"}, "quantize"),
        ({"controller": BUDGETED, "chunk": SEGMENT, "prefill_batch": SEGMENT}, "a budget"),
    ],
)
def test_what_is_not_served_over_a_mesh_is_refused(changes, told):
    configuration(**changes)
    with pytest.raises(ValueError, match=f"mesh: got one beside {told},"):
        configuration(mesh=ALONE, **changes)
