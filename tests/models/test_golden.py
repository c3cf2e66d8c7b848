"""Every family equals transformers, by files that scripts/make_golden.py wrote."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.checkpoint import load
from et_jax.models.transformer import forward

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = Path(os.environ.get("ET_JAX_SHARED", Path(__file__).parents[2].parent / "shared"))
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def dense_attend(config):
    """Causal attention over the sequence itself, in a layer's window: softmax(q k / sqrt(d)) v."""

    def attend(layer, q, k, v, memory):
        b, t, h, d = q.shape
        q = q.reshape(b, t, config.num_kv_heads, config.group_size, d)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / d**0.5
        distance = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        window = config.windows[layer]
        kept_mask = (distance >= 0) & (distance < (t if window is None else window))
        weights = jax.nn.softmax(jnp.where(kept_mask, scores, -jnp.inf))
        return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, h, d), memory

    return attend


def dense_logits(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with jax.default_matmul_precision("highest"):
        return forward(params, config, jnp.asarray(tokens), positions, dense_attend(config), None)[0]


def test_all_families_are_here():
    assert len(FAMILIES) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    config, params = load(GOLDEN / family)
    golden = np.load(GOLDEN / family / "golden.npz")
    assert golden["logits"].std() > 1
    np.testing.assert_allclose(dense_logits(config, params, golden["tokens"]), golden["logits"], atol=1e-4, rtol=0)


def test_greedy_texts_of_a_real_model_equal_those_of_transformers():
    folder = SHARED / "models/tinystories-656k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; set ET_JAX_SHARED to the folder of shared models")
    config, params = load(folder)
    for row in json.loads((GOLDEN / "tinystories-656k.json").read_text()):
        tokens = np.array([row["prompt_ids"] + row["ids"]], np.int32)
        greedy = dense_logits(config, params, tokens)[0].argmax(-1)
        assert greedy[len(row["prompt_ids"]) - 1 : -1].tolist() == row["ids"]
        assert (row["ids"][-1] in config.eos_token_ids) == row["stopped"]
