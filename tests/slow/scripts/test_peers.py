"""Engines beside this one: refusals, and one model in another's format."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.layers import rotate
from et_jax.models.transformer import initialise
from scripts import measure
from scripts.measuring.shapes import SMALL
from scripts.peers import gguf_file

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_a_checkout_without_the_package_is_refused(tmp_path, capsys):
    assert measure.main(["peers", "--checkout", str(tmp_path)]) == 2
    assert "which has no et_jax; name a checkout of it." in capsys.readouterr().err


@pytest.mark.parametrize(("python", "said"), [("nowhere", "cannot be run"), (sys.executable, "lacks llama.cpp")])
def test_a_python_without_an_engine_is_refused(python, said, capsys):
    assert measure.main(["peers", "--quick", "--llama-python", python]) == 2
    assert said in capsys.readouterr().err


def test_weights_are_read_as_they_were_written(tmp_path):
    params = initialise(SMALL, jax.random.key(0), jnp.bfloat16)
    write_hugging_face(tmp_path, SMALL, params)
    found = gguf_file.stored(tmp_path / "model.safetensors")
    up = params.layers[1].up
    assert up is not None
    np.testing.assert_array_equal(found["model.layers.1.mlp.up_proj.weight"], np.asarray(up.array, np.float32))
    names = [gguf_file.named(name) for name in found]
    assert len(set(names)) == len(names) == 3 + 9 * SMALL.num_layers
    expected = "token_embd.weight output_norm.weight output.weight blk.0.attn_q.weight blk.1.ffn_down.weight"
    assert set(expected.split()) <= set(names)


def test_scores_are_those_of_weights_whose_pairs_are_side_by_side():
    """Su et al. 2021: channels 2i and 2i + 1 turn by one angle."""
    rng, heads, head_dim, width = np.random.default_rng(0), 3, 8, 5
    weights = rng.normal(size=(2, heads * head_dim, width)).astype(np.float32)
    x, angles = rng.normal(size=(4, width)).astype(np.float32), rng.normal(size=(4, head_dim // 2)).astype(np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)

    def side_by_side(weight):
        y = (x @ gguf_file.interleaved(weight, head_dim).T).reshape(4, heads, head_dim // 2, 2)
        turned = (y[..., 0] + 1j * y[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(4, heads, head_dim)

    def here(weight):
        y = jnp.asarray(x @ weight.T).reshape(1, 4, heads, head_dim)
        return np.asarray(rotate(y, jnp.asarray(cosine[None]), jnp.asarray(sine[None])))[0]

    (q, k), (own_q, own_k) = map(side_by_side, weights), map(here, weights)
    np.testing.assert_allclose(np.einsum("ahd,bhd->hab", q, k), np.einsum("ahd,bhd->hab", own_q, own_k), atol=1e-4)
