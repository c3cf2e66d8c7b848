"""Along which axis every weight is split, and the models that are refused."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from et_jax.models.config import ExpertConfig, ModelShape
from et_jax.models.params import abstract
from et_jax.models.sharding import check, weight_specs
from et_jax.models.weights import Int8
from scripts.measuring.shapes import LLAMA_3_8B

EXPERTS = ExpertConfig(
    num_experts=6, num_per_token=2, width=14336, normalised=True, layers=(True,) * 32, shared_width=256, biases=True
)
MIXTURE = dataclasses.replace(LLAMA_3_8B, architecture="mixtral", experts=EXPERTS, sinks=True)
MODULE = ModelShape(**{field.name: getattr(LLAMA_3_8B, field.name) for field in dataclasses.fields(ModelShape)})


def over(num_chips: int) -> AbstractMesh:
    return AbstractMesh((num_chips,), ("tp",))


@pytest.mark.parametrize("stacked", [False, True])
def test_scales_of_8_bit_weights_are_split_with_their_outputs(stacked):
    lead = (None,) * stacked
    layer = weight_specs(abstract(LLAMA_3_8B, jnp.bfloat16, "int8", stacked=stacked), LLAMA_3_8B).layers[0]
    assert isinstance(layer.q, Int8) and isinstance(layer.o, Int8)
    assert (layer.q.array, layer.q.scale) == (P(*lead, "tp", None), P(*lead, "tp"))
    assert (layer.o.array, layer.o.scale) == (P(*lead, None, "tp"), P(*lead, None))
    assert layer.attention_norm == P(*lead, None)


@pytest.mark.parametrize(
    ("model", "mesh", "told"),
    [
        (LLAMA_3_8B, over(16), "num_kv_heads = 8"),
        (dataclasses.replace(LLAMA_3_8B, vocab_size=128_257), over(8), "vocab = 128257"),
        (dataclasses.replace(MIXTURE, experts=dataclasses.replace(EXPERTS, width=12)), over(8), "expert_ffn = 12"),
        (LLAMA_3_8B, AbstractMesh((8,), ("x",)), "axes"),
        (MODULE, over(8), "ModelConfig"),
    ],
)
def test_what_cannot_be_split_is_refused(model, mesh, told):
    check(LLAMA_3_8B, over(8))
    check(MIXTURE, over(2))
    with pytest.raises(ValueError, match=told):
        check(model, mesh)
