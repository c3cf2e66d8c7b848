"""A sequence shorter than the least context reads all, and nothing is scored for it, alone and beside longer ones."""

import math

import numpy as np
import pytest
from small_model import MODEL, NARROW, PAGE, configuration, prompt, run, same_bits, start, weights

from et_jax.control.presets import preset
from et_jax.decode.decoder import decoder
from et_jax.models.calibration import Calibration
from et_jax.types import Table

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LEAST, SHORT, LONG, STEPS = 24, 9, 30, 8
HEADS = np.ones((MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size), np.float32)


def controller(name: str, min_context: int = LEAST):
    return preset(name, tolerance=0.5, min_blocks=1, window=4, min_context=min_context)


def everything(row) -> np.ndarray:
    """The blocks that a step reads of a sequence where it reads all."""
    return -(-row.signals.length // PAGE) * MODEL.num_layers * MODEL.num_kv_heads


def text_and_reads(row):
    """What a sequence came to; what a step costs depends on the batch."""
    names = ("entropy", "surprisal", "kept_mass", "attention_entropy", "blocks_read", "summaries_read")
    return row.token, [getattr(row.signals, name) for name in names]


@pytest.mark.parametrize("name", ["certified", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_only_long_sequences_choose_blocks_whatever_the_lengths_beside_them(name):
    d = decoder(configuration(controller=controller(name), calibration=Calibration(sensitivity=Table(HEADS))))

    def rows_of(lengths: dict[int, int], min_context: int = LEAST):
        """The rows of the output of every slot, whose prompts have these lengths."""
        state = d.empty()
        for slot, length in lengths.items():
            asked = {"control": controller(name, min_context), "seed": slot, "limit": STEPS}
            state = start(d, weights(), state, slot, prompt(slot, length), **asked)
        return run(d, weights(), state)[1]

    among = rows_of({0: SHORT, 1: LONG})
    short, long = among[0], among[1]
    assert len(short.token) == STEPS and not short.signals.summaries_read.any()
    np.testing.assert_array_equal(short.signals.blocks_read, everything(short))
    np.testing.assert_array_equal(short.signals.kept_mass, 1.0)
    assert np.isnan(short.signals.attention_entropy).all()
    assert same_bits(text_and_reads(rows_of({0: SHORT})[0]), text_and_reads(short))
    # a long one reads what it reads without a least context
    assert (long.signals.blocks_read < everything(long)).any()
    assert same_bits(text_and_reads(rows_of({1: LONG}, 1)[1]), text_and_reads(long))
    # scoring begins with the token that reaches the least context
    passing = rows_of({0: LEAST - 4})[0]
    scored = ~np.isnan(passing.signals.attention_entropy)
    np.testing.assert_array_equal(scored, passing.signals.length >= LEAST)
    assert scored.any() and not scored.all() and math.isfinite(passing.signals.entropy.sum())


def test_a_layer_with_a_window_scores_no_blocks_of_rows_longer_than_two_windows():
    d = decoder(configuration(model=NARROW, controller=preset("certified", tolerance=0.5, min_blocks=1, window=4)))
    state = start(d, weights(model=NARROW), d.empty(), 0, prompt(0, SHORT), seed=0, limit=STEPS)
    row = run(d, weights(model=NARROW), state)[1][0]
    layers = np.where(row.signals.length <= 12, 2, 1)
    assert set(layers) == {1, 2}
    blocks = -(-row.signals.length // PAGE)
    np.testing.assert_array_equal(row.signals.summaries_read, layers * blocks * NARROW.num_kv_heads)
    assert np.all(row.signals.kept_mass >= 0.5) and np.isfinite(row.signals.attention_entropy).all()
    first = np.maximum(row.signals.length - 6, 0) // PAGE
    of_window = (blocks - first) * NARROW.num_kv_heads
    assert np.all(row.signals.blocks_read[layers == 1] >= of_window[layers == 1] + NARROW.num_kv_heads)
