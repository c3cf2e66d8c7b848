"""Along which axis every weight is split, and the models that are refused."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from et_jax.models.config import ExpertConfig, ModelShape
from et_jax.models.params import abstract
from et_jax.models.sharding import check, expert_specs, of_chip, weight_specs
from et_jax.types import replace
from scripts.measuring.shapes import LLAMA_3_8B

EXPERTS = ExpertConfig(
    num_experts=6, num_per_token=2, width=14336, normalised=True, layers=(True,) * 32, shared_width=256, biases=True
)
MIXTURE = dataclasses.replace(LLAMA_3_8B, architecture="mixtral", experts=EXPERTS, sinks=True)
MODULE = ModelShape(**{field.name: getattr(LLAMA_3_8B, field.name) for field in dataclasses.fields(ModelShape)})


def over(num_chips: int) -> AbstractMesh:
    return AbstractMesh((num_chips,), ("tp",))


@pytest.mark.parametrize("stacked", [False, True])
def test_weights_are_split_by_heads_widths_and_vocabulary(stacked):
    lead = (None,) * stacked
    weights = abstract(MIXTURE, jnp.bfloat16, stacked=stacked)
    specs = weight_specs(weights, MIXTURE)
    layer = specs.layers[0]
    experts = layer.experts
    assert specs.head is not None and experts is not None and experts.shared is not None
    assert (specs.embedding.array, specs.head.array, specs.final_norm) == (P("tp", None), P("tp", None), P(None))
    for name in "qkv":
        assert getattr(layer, name).array == P(*lead, "tp", None)
    assert layer.o.array == P(*lead, None, "tp")
    assert layer.sinks == P(*lead, "tp") and layer.attention_norm == P(*lead, None)
    assert experts.gate.array == experts.up.array == P(*lead, None, "tp", None)
    assert experts.down.array == P(*lead, None, None, "tp")
    assert experts.up_bias == P(*lead, None, "tp") and experts.down_bias == P(*lead, None, None)
    assert experts.router == P(*lead, None, None)
    assert experts.shared.up.array == P(*lead, "tp", None) and experts.shared.down.array == P(*lead, None, "tp")


def test_eight_chips_hold_an_eighth_of_the_matrices_each():
    """All but the norms and the biases of what is added up."""
    model = LLAMA_3_8B
    weights = abstract(model, jnp.bfloat16)
    held = jax.tree.map(
        lambda x, spec: math.prod(x.shape) // 8 ** list(spec).count("tp"), weights, weight_specs(weights, model)
    )
    norms = (2 * model.num_layers + 1) * model.hidden_size
    matrices = 8_030_261_248 - norms  # Grattafiori et al. 2024: 8.03 billion
    assert sum(jax.tree.leaves(held)) == matrices // 8 + norms


def test_experts_of_a_stack_lead_with_its_layers_where_they_lie_there():
    experts: Any = abstract(MIXTURE, jnp.bfloat16, stacked=True).layers[0].experts
    one = jax.eval_shape(lambda experts: replace(experts.of_turn(0), turn=None), experts)
    specs = expert_specs(one, MIXTURE)
    assert specs.gate.array == P(None, None, "tp", None) and specs.gate_bias == P(None, "tp")


def test_a_chip_sees_its_own_heads():
    own = of_chip(LLAMA_3_8B, over(8))
    assert (own.num_heads, own.num_kv_heads, own.group_size) == (4, 1, 4)


@pytest.mark.parametrize(
    ("model", "mesh", "told"),
    [
        (LLAMA_3_8B, over(16), "num_kv_heads = 8"),
        (dataclasses.replace(LLAMA_3_8B, vocab_size=128_257), over(8), "vocab = 128257"),
        (dataclasses.replace(LLAMA_3_8B, intermediate_size=14_340), over(8), "ffn = 14340"),
        (dataclasses.replace(MIXTURE, experts=dataclasses.replace(EXPERTS, width=12)), over(8), "expert_ffn = 12"),
        (LLAMA_3_8B, AbstractMesh((8,), ("x",)), "axes"),
        (LLAMA_3_8B, AbstractMesh((1, 2), ("dp", "tp")), "axes"),
        (MODULE, over(8), "ModelConfig"),
    ],
)
def test_what_cannot_be_split_is_refused(model, mesh, told):
    with pytest.raises(ValueError, match=told):
        check(model, mesh)


def test_what_can_be_split_is_not():
    check(LLAMA_3_8B, over(8))
    check(MIXTURE, over(2))
