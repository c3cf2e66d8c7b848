"""What experts cost is told by those that tokens went to."""

import dataclasses

import jax
import pytest
from scripts_here import script

from et_jax.models.transformer import initialise

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_every_line_tells_the_experts_touched_and_their_bytes():
    bench = script("bench_experts")
    layer = dataclasses.replace(
        bench.SMALL, hidden_size=bench.WIDTH, num_layers=1, windows=(None,), experts=bench.CONFIG
    )
    found = bench.measured(initialise(layer, jax.random.key(0), "bfloat16"), batch=3, among=4, rounds=2)
    assert (found["batch"], found["among"], found["touched"]) == (3, 4, 4)
    assert found["megabytes"] == 4 * 3 * bench.CONFIG.width * bench.WIDTH * 2 / 1e6
    assert set(found["milliseconds"]) == {"loop", "ragged"} and min(found["milliseconds"].values()) > 0
