"""Configurations that transformers writes none of: read back as written, and those without a spelling are not written.

What is refused of a config.json stands in `test_hostile.py`.
"""

import dataclasses

import pytest

from et_jax.models.config import RopeScaling
from et_jax.models.families.registry import config_to_hugging_face, from_hugging_face
from scripts.measuring.shapes import SMALL

PLAIN = dataclasses.replace(
    SMALL, num_layers=3, windows=(None, None, None), rope_theta=5e5, bos_token_id=1, eos_token_ids=(2,)
)
QWEN = dataclasses.replace(PLAIN, architecture="qwen2", qkv_bias=True)
LINEAR = RopeScaling(kind="linear", original_max_positions=32, factor=4.0)
YARN = dataclasses.replace(LINEAR, kind="yarn", beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(PLAIN, eos_token_ids=(2, 5), bos_token_id=None, tie_embeddings=True),
        dataclasses.replace(PLAIN, eos_token_ids=()),
        dataclasses.replace(PLAIN, rope_scaling=YARN),
        dataclasses.replace(QWEN, windows=(None, 8, 8)),
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


def test_rotary_settings_are_read_from_older_and_newer_files():
    config = dataclasses.replace(PLAIN, rope_scaling=LINEAR, rope_theta=7.0)
    values = config_to_hugging_face(config)
    older, theta = values.pop("rope_scaling"), values.pop("rope_theta")
    for spelling in (
        {"rope_scaling": older, "rope_theta": theta},
        {"rope_parameters": {"rope_theta": theta} | older},
    ):
        assert from_hugging_face(values | spelling) == config
