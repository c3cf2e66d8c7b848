"""A model of every part over eight devices: the texts, the reads and the logits of one device.

`tests/laws` say of plainer models over four devices that their texts are those of the dense model.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from mixtures import BIASED, CONFIG
from small_model import MODEL, begun, configuration

from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder
from et_jax.models.params import Params
from et_jax.models.sharding import AXIS, placed
from et_jax.models.transformer import initialise
from et_jax.types import replace

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("hardly_optimised")]

TOKENS = 24
EXPERTS = dataclasses.replace(CONFIG, **BIASED | {"width": 24, "layers": (True, True), "shared_width": 16})
PARTS = dict.fromkeys(("sinks", "qkv_bias", "o_bias", "qk_norm", "tie_embeddings"), True)
ODD = dataclasses.replace(
    MODEL, num_heads=16, num_kv_heads=8, windows=(6, None), experts=EXPERTS, qk_norm_over="width", **PARTS
)
PAPER = preset("paper", tolerance=0.5, min_blocks=1, window=4, target_entropy=2.0)


def drawn() -> Params:
    """Random weights of which none is 0, as biases and sinks begin, and logits by which a token is rather certain."""
    params = initialise(ODD, jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.15 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    params = structure.unflatten(moved)
    return replace(params, final_norm=4 * params.final_norm)


def decoded(mesh: Mesh | None) -> dict[str, np.ndarray]:
    """The greedy texts of three sequences, and of every step the logits, what was read, and what was observed."""
    sizes = {"num_pages": 49, "keep": frozenset({"logits"}), "trace_reads": True}
    d = decoder(configuration(model=ODD, controller=PAPER, mesh=mesh, **sizes))
    params = drawn() if mesh is None else placed(drawn(), ODD, mesh)
    state, steps = begun(d, params, lambda slot: {"temperature": 0.0, "limit": TOKENS}), []
    for _ in range(TOKENS):
        state, output = d.step((params,), state)
        assert output.produced.all() and output.reads is not None
        signals = [x[0].astype(jnp.float32) for x in jax.tree.leaves(output.signals)]
        observed = output.token[0], state.logits, output.reads[0], jnp.stack(signals)
        steps.append(tuple(map(np.asarray, observed)))  # the next step has the state's own
    if mesh is not None:
        pages = state.plants[0].cache.layers[0].pages
        assert pages.addressable_shards[0].data.shape == (1, *pages.shape[1:])
    names = "tokens", "logits", "reads", "signals"
    return {name: np.stack(rows) for name, rows in zip(names, zip(*steps, strict=True), strict=True)}


def test_a_model_over_eight_devices_is_the_model_on_one():
    """Its sums are those of eight parts, so that float32 rounds them otherwise."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    assert mesh.size == 8
    alone, together = decoded(None), decoded(mesh)
    for name in ("tokens", "reads"):
        np.testing.assert_array_equal(together[name], alone[name])
    assert np.abs(alone["logits"] - together["logits"]).max() <= 1e-5 * max(1.0, np.abs(alone["logits"]).max())
    np.testing.assert_allclose(together["signals"], alone["signals"], rtol=1e-4, atol=1e-4)
    assert np.ptp(together["reads"][:, :, 1], axis=-1).any()  # heads of one layer read different numbers of blocks
