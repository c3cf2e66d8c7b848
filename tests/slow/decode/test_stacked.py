"""Layers that are alike and run by a scan: the text by stacked weights and by those apart, and programs that stay."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, PAGE, PROMPTS, begun, configuration, run, texts, weights

from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.control.draft import FixedLength
from et_jax.control.presets import preset
from et_jax.decode.decoder import Decoder, decoder
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params, in_stacks
from et_jax.models.stacks import stacks_of
from scripts.measuring.shapes import even_heads

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def deep(windows: tuple[int | None, ...], **changes) -> ModelConfig:
    return dataclasses.replace(MODEL, num_layers=len(windows), windows=windows, **changes)


LLAMA = deep((None,) * 2)
GEMMA = deep((6, None) * 2 + (6,), norms="around", score_cap=20.0, window_rope_theta=100.0)
CERTIFIED = preset("certified", tolerance=0.5, min_blocks=1, window=4, target_entropy=2.0)
ENTROPYINFER = preset("entropyinfer", prefill_budget=16)
KEPT = named("pyramidkv", 16, window=6, gap=3)
WAYS = {
    "prompts read in part": (LLAMA, {"controller": ENTROPYINFER}),
    "drafts": (LLAMA, {"draft": Drafting(most=1, length=FixedLength(), drafter=Pruned(share=0.2))}),
    "compression": (GEMMA, {"compression": KEPT}),
}


def of(model: ModelConfig, stacked: bool, **changes) -> tuple[Decoder, tuple[Params, ...]]:
    """A decoder, and the weights of its models, which are stacked or apart."""
    changes = {"keep": frozenset({"logits"}), "calibration": even_heads(model), "num_pages": 49} | changes
    chunk = changes.get("controller", Controller()).budget
    if chunk is not None:
        size = -(-chunk.segment // PAGE) * PAGE
        changes |= {"chunk": size, "prefill_batch": 2 * size}
    d = decoder(configuration(model=model, **changes))
    return d, tuple(as_stacked(one) if stacked else weights(model=one) for one in d.config.models)


@functools.cache
def as_stacked(model: ModelConfig) -> Params:
    return in_stacks(weights(model=model), model, lambda *leaves: jnp.stack(leaves))


def decoded(d: Decoder, params: tuple[Params, ...]) -> tuple[dict[int, list[int]], np.ndarray, int]:
    """The texts of three sequences, one of them greedy, the last logits of each, and how many tokens were drafted.

    The last of them is compressed where the decoder can.
    """
    state = begun(d, params, lambda slot: {"seed": slot, "temperature": float(slot), "limit": 24})
    state, first = run(d, params, state, 16)
    if d.config.compression is not None:
        state, granted = d.compress(state, jnp.int32(2))
        assert granted and int(state.num_cached[2]) < int(state.length[2])
    state, rest = run(d, params, state)
    written = {slot: [*texts(first)[slot], *texts(rest)[slot]] for slot in PROMPTS}
    rows = () if d.config.draft is None else (*first.values(), *rest.values())
    assert state.logits is not None
    return written, np.asarray(state.logits), sum(int(row.drafted.sum()) for row in rows)


@pytest.mark.parametrize("name", WAYS)
def test_a_text_by_stacked_weights_is_that_by_weights_apart(name):
    """Its logits too, but for what XLA rounds otherwise in a conditional."""
    model, changes = WAYS[name]
    assert len(stacks_of(model)) < model.num_layers
    written, logits, drafted = decoded(*of(model, True, **changes))
    apart, expected, _ = decoded(*of(model, False, **changes))
    assert (drafted > 0) == ("draft" in changes)
    assert written == apart and all(len(text) == 24 for text in written.values())
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def lines_of(depth: int, function: str, **changes) -> int:
    """How many lines of StableHLO a function of a decoder of so many layers has."""
    d, params = of(deep((None, 6) * (depth // 2)), True, **changes)
    state, rows = d.empty(), jnp.zeros(d.config.prefill_batch // d.config.chunk, jnp.int32)
    given = {
        "step": (params, state),
        "prefill": (params, state, rows, jnp.zeros((len(rows), d.config.chunk), jnp.int32), rows, rows > 0),
        "compress": (state, jnp.int32(0)),
    }
    return len(getattr(d, function).lower(*given[function]).as_text().splitlines())


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        ("step", {"controller": CERTIFIED, "draft": Drafting(most=1)}),
        ("prefill", {"controller": ENTROPYINFER}),
        ("compress", {"compression": named("latent", 16, window=6, gap=3)}),
    ],
)
def test_a_program_is_as_long_whatever_its_layers(function, changes):
    assert lines_of(14, function, **changes) == lines_of(22, function, **changes)
