"""Families of models: what a config.json leaves unsaid or says in their own way, and configurations written to one.

That every family is what transformers makes of it stands in `test_golden.py`, what is refused in `test_hostile.py`.
"""

import dataclasses

import pytest

from et_jax.errors import UsageError
from et_jax.models.config import ClampedSwish, RopeScaling
from et_jax.models.families.registry import FAMILIES, config_to_hugging_face, from_hugging_face
from scripts.measuring.shapes import SMALL

LAYER_TYPES = ["full_attention", "sliding_attention"]
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12}


def shaped(name: str, **changes):
    """A small configuration of a family, as its config.json would be read."""
    values = config_to_hugging_face(SMALL) | {"architectures": [FAMILIES[name].class_name]}
    return from_hugging_face(values | (MIXTURE if name in MIXTURES else {}) | changes)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": LAYER_TYPES}, (None, 8)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "layer_types": LAYER_TYPES}, (None, None)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None, None)),  # from layer 28 on
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
        ("gemma3_text", {"sliding_window": 8}, (8, 8)),  # layer 6 is the first without
        ("qwen2_moe", {"sliding_window": 0, "max_window_layers": 28}, (None, None)),  # as transformers writes it
        ("gpt_oss", {}, (128, None)),
    ],
)
def test_windows_are_what_the_family_means_by_them(name, changes, windows):
    assert shaped(name, **changes).windows == windows


def test_layers_turn_by_their_kind():
    gemma = shaped("gemma3_text", rope_theta=1e6, num_hidden_layers=6, sliding_window=8)
    assert [one.theta for one in map(gemma.rope, range(6)) if one] == [1e4] * 5 + [1e6]
    smol = shaped("smollm3", num_hidden_layers=5)
    assert [smol.rope(layer) is None for layer in range(5)] == [False, False, False, True, False]
    assert shaped("smollm3", no_rope_layer_interval=2).unrotated == (1,)
    assert shaped("smollm3", no_rope_layers=[0, 1]).unrotated == (0,)
    assert shaped("phi3", head_dim=16, partial_rotary_factor=0.75).rope_dim == 12
    assert shaped("llama", rope_theta=None, rope_parameters={"rope_theta": 7.0}).rope_theta == 7.0


def test_the_text_model_is_read_of_a_config_json_of_text_and_images():
    text = {name: value for name, value in config_to_hugging_face(SMALL).items() if name != "architectures"}
    written = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    config = from_hugging_face(written | {"text_config": text | {"head_dim": None}, "vision_config": {"layers": 3}})
    assert (config.architecture, config.hidden_size, config.head_dim) == ("gemma3", SMALL.hidden_size, 256)
    assert config.eos_token_ids == (1, 106) and config.bos_token_id == 2


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("gpt_oss", {}, (True, True, True, True)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, (False, True, False, True)),
        ("qwen3_moe", {"decoder_sparse_step": 0}, (False, False, False, False)),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
    ],
)
def test_some_layers_of_a_mixture_are_dense(name, changes, layers):
    experts = shaped(name, num_hidden_layers=4, **changes).experts
    assert experts is not None and experts.layers == layers
    assert experts.width == (SMALL.intermediate_size if name in ("mixtral", "gpt_oss") else 20)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_local_experts": None}, r"config.json: the field num_\w*experts is missing; take the file"),
        ({"num_experts_per_tok": 5}, "config.json: num_experts_per_tok is 5 of 4 experts; take the file"),
        ({"num_local_experts": 4_000_000}, "config.json: there are 8000000 experts over all layers, more than 131072;"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_a_sentence(name, changes, said):
    with pytest.raises(UsageError, match=said):
        shaped(name, **changes)


def test_what_a_config_leaves_unsaid_is_as_the_family_was_published():
    assert all(shaped(name, tie_word_embeddings=None).tie_embeddings for name in ("gemma2", "gemma3_text", "gemma3"))
    normalised = {name: experts.normalised for name in MIXTURES if (experts := shaped(name).experts)}
    assert normalised == {"mixtral": True, "qwen2_moe": False, "qwen3_moe": False, "gpt_oss": True}
    config = shaped("gpt_oss", rms_norm_eps=None, rope_theta=None, head_dim=None)
    assert (config.norm_eps, config.rope_theta, config.head_dim) == (1e-5, 150_000.0, 64)
    scaling, experts = config.rope_scaling, config.experts
    assert scaling is not None and experts is not None
    found = scaling.kind, scaling.factor, scaling.original_max_positions, scaling.truncate
    assert found == ("yarn", 32.0, 4096, False)
    assert experts.activation == ClampedSwish(alpha=1.702, limit=7.0)
    config = shaped("gpt_oss", attention_bias=False, swiglu_limit=5.0)
    assert not config.qkv_bias and not config.o_bias and config.experts is not None
    assert config.experts.activation == ClampedSwish(alpha=1.702, limit=5.0)


PLAIN = dataclasses.replace(
    SMALL, num_layers=3, windows=(None, None, None), rope_theta=5e5, bos_token_id=1, eos_token_ids=(2,)
)
QWEN = dataclasses.replace(PLAIN, architecture="qwen2", qkv_bias=True)
YARN = RopeScaling(
    kind="yarn", original_max_positions=32, factor=4.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25
)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(PLAIN, eos_token_ids=(2, 5), bos_token_id=None, tie_embeddings=True),
        dataclasses.replace(PLAIN, eos_token_ids=()),
        dataclasses.replace(PLAIN, rope_scaling=YARN),
        dataclasses.replace(QWEN, windows=(8, None, 8)),
    ],
)
def test_a_configuration_survives_config_json(config):
    assert from_hugging_face(config_to_hugging_face(config)) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (8, 8, 8)},
        {"qkv_bias": True},
        {"architecture": "mistral", "windows": (8, None, 8)},
        {"architecture": "gpt2"},
    ],
)
def test_a_configuration_without_a_spelling_is_never_written(changes):
    with pytest.raises(ValueError, match="architecture"):
        config_to_hugging_face(dataclasses.replace(PLAIN, **changes))
