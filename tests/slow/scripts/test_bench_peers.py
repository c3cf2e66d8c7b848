"""Engines side by side: one model in the other's format, and ratios taken turn by turn."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import gguf_file
from scripts_here import script

from et_jax.evidence import serving_tables
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.layers import rotate
from et_jax.models.transformer import initialise
from scripts.measuring.shapes import SMALL


def test_weights_are_read_as_they_were_written(tmp_path):
    params = initialise(SMALL, jax.random.key(0), jnp.bfloat16)
    write_hugging_face(tmp_path, SMALL, params)
    found = gguf_file.stored(tmp_path / "model.safetensors")
    up = params.layers[1].up
    assert up is not None
    np.testing.assert_array_equal(found["model.layers.1.mlp.up_proj.weight"], np.asarray(up.array, np.float32))
    names = [gguf_file.named(name) for name in found]
    assert len(set(names)) == len(names) == 3 + 9 * SMALL.num_layers
    assert {
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
        "blk.0.attn_q.weight",
        "blk.1.ffn_down.weight",
    } <= set(names)


def test_scores_are_those_of_weights_whose_pairs_stand_side_by_side():
    """Su et al. 2021: channels 2i and 2i + 1 turn by one angle."""
    rng, heads, head_dim, width = np.random.default_rng(0), 3, 8, 5
    weights = rng.normal(size=(2, heads * head_dim, width)).astype(np.float32)
    x, angles = rng.normal(size=(4, width)).astype(np.float32), rng.normal(size=(4, head_dim // 2)).astype(np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)

    def side_by_side(weight):
        y = (x @ gguf_file.interleaved(weight, head_dim).T).reshape(4, heads, head_dim // 2, 2)
        first, second = y[..., 0], y[..., 1]
        c, s = cosine[:, None], sine[:, None]
        return np.stack([first * c - second * s, second * c + first * s], axis=-1).reshape(4, heads, head_dim)

    def here(weight):
        y = jnp.asarray(x @ weight.T).reshape(1, 4, heads, head_dim)
        return np.asarray(rotate(y, jnp.asarray(cosine[None]), jnp.asarray(sine[None])))[0]

    (q, k), (own_q, own_k) = map(side_by_side, weights), map(here, weights)
    np.testing.assert_allclose(np.einsum("ahd,bhd->hab", q, k), np.einsum("ahd,bhd->hab", own_q, own_k), atol=1e-4)


class Played:
    """An engine whose turns take what they are told to."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = iter((99.0, *seconds))  # the first turn is not counted

    def ask(self, do: str, **request) -> None:
        assert do == "load" and request["batch"] == 2

    def generate(self, prompts: list, tokens: int) -> dict:
        assert [len(prompt) for prompt in prompts] == [3, 3]
        return {"seconds": next(self.seconds), "first": 0.5}


def test_ratios_are_taken_turn_by_turn():
    bench = script("bench_peers")
    workers = {
        ("et_jax", "bfloat16"): Played(2.0, 4.0, 8.0),
        ("et_jax", "int8"): Played(1.0, 2.0, 4.0),
        ("llama.cpp", "Q8_0"): Played(1.0, 6.0, 8.0),
    }
    args = argparse.Namespace(rounds=3, tokens=8, prompt_tokens=3)
    case = bench.measured(workers, "folder", 2, args)
    own, _, peer = case["ways"]
    assert own["tokens_per_second"] == 2 * 8 / 4.0 and (own["slowest"], own["fastest"]) == (2.0, 8.0)
    assert own["steps_per_second"] == pytest.approx(7 / 3.5)
    assert peer["et_jax_over_it"]["bfloat16"] == {"ratio": 1.0, "least": 0.5, "most": 1.5}
    assert peer["et_jax_over_it"]["int8"] == {"ratio": 2.0, "least": 1.0, "most": 3.0}
    shown = serving_tables.peers([case], [{"engine": "llama.cpp", "together": 31, "tokens": 32}])
    assert "et_jax loses: nowhere." in shown and "llama.cpp 31 of 32" in shown
    peer["et_jax_over_it"]["bfloat16"]["ratio"] = 0.75
    assert "et_jax loses: bfloat16 at 2 to llama.cpp Q8_0 (0.75)." in serving_tables.peers([case], [])


def test_tokens_agree_up_to_the_first_that_differs():
    bench = script("bench_peers")
    assert bench.num_equal([1, 2, 3], [1, 2, 3]) == 3
    assert bench.num_equal([1, 2, 3], [1, 5, 3]) == 1
