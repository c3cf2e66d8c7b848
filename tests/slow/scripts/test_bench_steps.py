"""What a step takes is measured of presets that choose, each from the same cache."""

import json

import jax
import numpy as np
import pytest
from scripts_here import script

from et_jax.evidence import tables
from et_jax.serve.min_context import MEASURED, NEVER
from scripts.measuring.results import RESULTS
from scripts.measuring.shapes import SMALL

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LENGTH, STEPS = 300, 4


def test_every_preset_is_timed_from_one_cache_that_comes_back():
    bench = script("bench_steps")
    shape = bench.Shape(SMALL, rows=2, capacity=512, length=LENGTH, steps=STEPS)
    before = jax.device_get(shape.cache)
    ways = {name: shape.started(control, STEPS) for name, control in bench.CONTROLS.items()}
    found = bench.by_turns(ways, rounds=2)
    assert [way["control"] for way in found] == ["off", "paper", "guarded", "certified", "adaptive"]
    assert found[0]["over_off"] == found[0]["share_read"] == 1.0
    shares = {way["control"]: way["share_read"] for way in found}
    assert 0 < min(shares["certified"], shares["adaptive"]) < 1, shares
    assert all(0 < way["share_read"] <= 1 and way["milliseconds"] > 0 for way in found)
    # what was held before the first step is as it was, whichever preset wrote the rest
    held = LENGTH // shape.config.page_size
    table = np.arange(1, 2 * shape.config.blocks_per_slot + 1).reshape(2, -1)[:, :held]
    for one, two in zip(before.layers, jax.device_get(shape.cache).layers, strict=True):
        for name in ("pages", "key_codes"):
            assert np.array_equal(getattr(one, name)[:, table], getattr(two, name)[:, table])


def test_random_caches_hold_what_was_written_in_every_layer():
    bench = script("bench_steps")
    cache = bench.Shape(SMALL, rows=2, capacity=512, length=LENGTH, steps=STEPS).cache
    d = SMALL.head_dim
    key = np.asarray(cache.layers[0].pages, np.float32)[:, 1:, :, :d]
    assert np.all(np.any(key != 0, axis=-1)) and len(cache.layers) == SMALL.num_layers
    box = np.asarray(cache.layers[1].summary.key_box, np.float32)[:, 1:]
    assert np.array_equal(box[..., :d], key.min(axis=2)) and np.array_equal(box[..., d : 2 * d], key.max(axis=2))


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ({128: 1.2, 480: 1.02, 1900: 0.9}, 480),
        ({128: 0.9, 480: 1.2, 1900: 0.9}, 1900),
        ({128: 0.9, 480: 0.9, 1900: 1.04}, None),
        ({128: 1.03}, 128),
    ],
)
def test_a_preset_pays_from_the_length_after_which_it_is_never_slower(ratios, length):
    cases = [
        {"model": "bundled", "rows": 2, "length": at, "ways": [{"control": "paper", "over_off": ratio}]}
        for at, ratio in ratios.items()
    ]
    faster = {"model": "bundled", "rows": 16, "length": max(ratios), "ways": [{"control": "paper", "over_off": 0.1}]}
    other = {"model": "shape", "rows": 2, "length": max(ratios), "ways": [{"control": "guarded", "over_off": 9.0}]}
    assert tables.pays_from([other, *cases, faster], "paper") == length


def test_the_least_contexts_are_those_recorded():
    recorded = json.loads((RESULTS / "steps.json").read_text(encoding="utf-8"))
    assert recorded["machine"]["device"] == "cpu"
    assert MEASURED["cpu"] == {
        name: tables.pays_from(recorded["cases"], name) or NEVER
        for name in ("paper", "guarded", "certified", "adaptive")
    }
