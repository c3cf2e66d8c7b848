"""Configurations: what is refused, and config.json read back as it was written."""

import dataclasses

import pytest

from et_jax.errors import UsageError
from et_jax.models.config import RopeScaling
from et_jax.models.families.registry import config_to_hugging_face, from_hugging_face
from scripts.measuring.shapes import SMALL

PLAIN = dataclasses.replace(
    SMALL, num_layers=3, windows=(None, None, None), rope_theta=5e5, bos_token_id=1, eos_token_ids=(2,)
)
QWEN = dataclasses.replace(PLAIN, architecture="qwen2", qkv_bias=True)


def scaled(kind, **fields):
    return dataclasses.replace(
        PLAIN, rope_scaling=RopeScaling(kind=kind, original_max_positions=32, factor=4.0, **fields)
    )


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        dataclasses.replace(PLAIN, eos_token_ids=(2, 5), bos_token_id=None, tie_embeddings=True),
        dataclasses.replace(PLAIN, eos_token_ids=()),
        scaled("linear"),
        scaled("llama3", low_freq_factor=1.5, high_freq_factor=3.0),
        scaled("yarn", beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        dataclasses.replace(PLAIN, architecture="mistral", windows=(8, 8, 8)),
        dataclasses.replace(QWEN, windows=(None, 8, 8)),
        dataclasses.replace(QWEN, windows=(8, None, 8)),
        dataclasses.replace(PLAIN, architecture="qwen3", qk_norm=True, head_dim=16),
    ],
)
def test_a_configuration_survives_config_json(config):
    assert from_hugging_face(config_to_hugging_face(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(PLAIN, windows=(8, 8, 8)),
        dataclasses.replace(PLAIN, qkv_bias=True),
        dataclasses.replace(PLAIN, architecture="mistral", windows=(8, None, 8)),
        dataclasses.replace(PLAIN, architecture="gpt2"),
    ],
)
def test_a_configuration_without_a_spelling_is_never_written(config):
    with pytest.raises(ValueError, match="architecture"):
        config_to_hugging_face(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": None}, "architecture 'none given' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised by .no known method. are not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_sentence(change, words):
    with pytest.raises(UsageError, match=words) as refusal:
        from_hugging_face(config_to_hugging_face(PLAIN) | change, "some/config.json")
    assert "some/config.json" in str(refusal.value)


def test_newer_files_keep_their_rotary_settings_together():
    values = config_to_hugging_face(scaled("linear"))
    values["rope_parameters"] = {"rope_theta": 7.0} | values.pop("rope_scaling")
    del values["rope_theta"]
    assert from_hugging_face(values) == dataclasses.replace(scaled("linear"), rope_theta=7.0)


def test_a_qwen_window_is_off_unless_switched_on():
    values = config_to_hugging_face(dataclasses.replace(QWEN, windows=(None, 8, 8)))
    assert from_hugging_face(values | {"use_sliding_window": False}).windows == (None, None, None)
    del values["layer_types"]
    assert from_hugging_face(values).windows == (None, 8, 8)
