"""A program of eight devices: small models over all of them and on one, their texts and how far their logits differ.

What it prints is one object for each case, by its name.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from small_model import MODEL, begun, configuration

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder
from et_jax.models.config import ClampedSwish, ExpertConfig, ModelConfig
from et_jax.models.params import Params, in_stacks
from et_jax.models.sharding import AXIS, placed
from et_jax.models.transformer import initialise
from et_jax.types import replace

TOKENS, TOLERANCE = 24, 0.5
LLAMA = dataclasses.replace(MODEL, num_heads=16, num_kv_heads=8)
EXPERTS = ExpertConfig(num_experts=6, num_per_token=3, width=24, normalised=True, layers=(True, True))
ODD = dataclasses.replace(EXPERTS, shared_width=16, biases=True, activation=ClampedSwish(alpha=1.702, limit=1.5))
PRUNED = {"tolerance": TOLERANCE, "min_blocks": 1, "window": 4, "target_entropy": 2.0}
MODELS = {
    "llama": LLAMA,
    "odd": dataclasses.replace(
        LLAMA,
        experts=ODD,
        windows=(6, None),
        sinks=True,
        qkv_bias=True,
        o_bias=True,
        qk_norm=True,
        qk_norm_over="width",
        tie_embeddings=True,
    ),
}
CASES = {
    "llama off": ("llama", Controller(), False),
    "llama certified": ("llama", preset("certified", **PRUNED), True),
    "odd paper": ("odd", preset("paper", **PRUNED), False),
}


def drawn(model: ModelConfig, stacked: bool) -> Params:
    """Random weights of which none is 0, as biases and sinks begin, and logits by which a token is rather certain."""
    params = initialise(model, jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.15 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    params = structure.unflatten(moved)
    params = replace(params, final_norm=4 * params.final_norm)
    return in_stacks(params, model, lambda *alike: jnp.stack(alike)) if stacked else params


def decoded(model: ModelConfig, controller: Controller, stacked: bool, mesh: Mesh | None) -> dict[str, np.ndarray]:
    """The greedy texts of three sequences, and of every step the logits, what was read, and what was observed."""
    sizes = {"num_pages": 49, "keep": frozenset({"logits"}), "tell_reads": True}
    d = decoder(configuration(model=model, controller=controller, stacked=stacked, mesh=mesh, **sizes))
    params = drawn(model, stacked)
    if mesh is not None:
        params = placed(params, model, mesh)
    state, steps = begun(d, params, lambda slot: {"temperature": 0.0, "limit": TOKENS}), []
    for _ in range(TOKENS):
        state, output = d.step((params,), state)
        assert output.produced.all() and output.reads is not None
        signals = [x[0].astype(jnp.float32) for x in jax.tree.leaves(output.signals)]
        observed = output.token[0], state.logits, output.reads[0], jnp.stack(signals), output.signals.kept_mass[0]
        steps.append(tuple(map(np.asarray, observed)))  # the next step has the state's own
    if mesh is not None:
        pages = state.plants[0].cache.layers[0].pages
        assert pages.addressable_shards[0].data.shape == (1, *pages.shape[1:])
    names = "tokens", "logits", "reads", "signals", "kept"
    return {name: np.stack(rows) for name, rows in zip(names, zip(*steps, strict=True), strict=True)}


def main() -> None:
    mesh, found = Mesh(np.array(jax.devices()), (AXIS,)), {}
    assert mesh.size == 8
    for name, (model, controller, stacked) in CASES.items():
        alone, together = (decoded(MODELS[model], controller, stacked, where) for where in (None, mesh))
        found[name] = {
            "texts": [alone["tokens"].T.tolist(), together["tokens"].T.tolist()],
            "reads": [alone["reads"].tolist(), together["reads"].tolist()],
            "kept": float(together["kept"].min()),
            "signals": bool(np.allclose(alone["signals"], together["signals"], rtol=1e-4, atol=1e-4, equal_nan=True)),
            "logits": float(np.abs(alone["logits"] - together["logits"]).max()),
            "largest": float(np.abs(alone["logits"]).max()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
