"""Every family through the paged cache: greedy text is that of the dense program, which is that of transformers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN
from small_model import LENGTH, PROMPTS, configuration, paged_texts

from et_jax.control import select, tolerance
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.control.smoothing import EmaEntropy
from et_jax.decode.decoder import decoder
from et_jax.models.checkpoint import load

pytestmark = pytest.mark.usefixtures("hardly_optimised")

# to the cache these are as others are
ALIKE = {"llama2", "llama_linear", "llama_untied", "llama_yarn", "mixtral_window", "qwen3_moe_unnormalised", "gemma3"}
ALIKE |= {"gpt_oss_mxfp4", "mistral", "olmo2", "phi3", "phi4_mini", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
ALIKE |= {"llama3", "mixtral"}
FAMILIES = sorted({folder.name for folder in GOLDEN.iterdir() if folder.is_dir()} - ALIKE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_from_pages_equals_the_dense_program(family):
    """With blocks chosen, at tolerance 0. Texts reach beyond every window."""
    config, params = load(GOLDEN / family)
    config = dataclasses.replace(config, eos_token_ids=())
    selector = select.Certified(select.coded_bounds)
    controller = Controller(law=chain(EmaEntropy(), tolerance.Constant(0.0)), selector=selector)
    rows = paged_texts(decoder(configuration(model=config, controller=controller)), params, temperature=0.0, limit=20)
    for slot, prompt in PROMPTS.items():
        written = rows[slot].token.tolist()
        assert len(written) == 20
        text = np.zeros((1, LENGTH), np.int32)
        text[0, : len(prompt) + 20] = prompt + written
        logits = np.asarray(dense_logits(config, params, jnp.asarray(text)))[0, len(prompt) - 1 :][:20]
        assert logits.argmax(axis=-1).tolist() == written
