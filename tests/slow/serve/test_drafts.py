"""Drafts in the engine: the clock sets the laws of their lengths."""

import jax
import jax.numpy as jnp
import pytest
from reopened import SIZES

from et_jax.serve import engine
from et_jax.serve.clocks.step_clock import GAIN
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import decoder_config

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIST = "The guests were these: Mr. Brown, Mrs. Brown, Miss Ada Brown, Mr. Grey. "


def test_the_clock_sets_laws_that_ask_for_times():
    """After some bursts the laws are others than those at the beginning."""
    model = engine.load(**SIZES | {"max_model_len": 192}, draft="self", draft_tokens=4)
    [replica] = model.replicas().replicas
    [before] = jax.device_get(replica.device.state.draft_laws)
    model.generate(["It was late in", LIST], max_tokens=150, ignore_eos=True)
    [own] = jax.device_get(replica.device.state.draft_laws)
    assert own.times != before.times and own.worth >= GAIN and own.times.plain > 0
    fixed = EngineConfig(draft="self", draft_length="fixed")
    draft = decoder_config(fixed, model.config, jnp.float32).draft
    assert draft is not None and draft.times is None
