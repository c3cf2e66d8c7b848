"""Which layers are alike and how they lie in stacks, and that what runs through them meets each in order."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, configuration

from et_jax.models.config import ExpertConfig, ModelShape
from et_jax.models.stacks import Turns, by_layer, compiler_options, folded, stacked_on, stacks_of, through
from scripts.measuring.shapes import SMALL


def model(windows: tuple[int | None, ...], **changes):
    return dataclasses.replace(SMALL, num_layers=len(windows), windows=windows, **changes)


SIZES = {name: getattr(SMALL, name) for name in ("vocab_size", "num_heads", "num_kv_heads", "head_dim")}
SIZES |= {"architecture": "of a module", "max_positions": 64}
MIXTURE = ExpertConfig(num_experts=4, num_per_token=2, width=8, normalised=True, layers=(False, True, True, True))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (model((None,) * 5), [(0, 1, 5, 0)]),
        (model((6, None) * 3), [(0, 2, 3, 0)]),
        (model((6, 6, None) * 3 + (6, 6)), [(0, 3, 3, 0), (9, 1, 2, 3)]),
        (model((6, 6, 6, None)), [(0, 1, 3, 0), (3, 1, 1, 1)]),
        (model((None,) * 4, unrotated=(1, 3)), [(0, 2, 2, 0)]),
        (model((None,) * 4, experts=MIXTURE), [(0, 1, 1, 0), (1, 1, 3, 1)]),
        (model((None,)), [(0, 1, 1, 0)]),
        (ModelShape(**SIZES, num_layers=2, windows=(None,) * 2), [(0, 1, 1, 0), (1, 1, 1, 1)]),
    ],
)
def test_the_period_that_covers_most_layers_is_a_stack(of, expected):
    found = stacks_of(of)
    assert [(one.first, one.period, one.depth, one.place) for one in found] == expected


def test_weights_are_stacked_on_chips_and_programs_of_stacks_are_compiled_for_a_gpu_to_read_them_in_place():
    platforms = "cpu", "tpu", "gpu", "cuda"
    assert [platform for platform in platforms if stacked_on(platform)] == ["tpu", "gpu", "cuda"]
    assert [platform for platform in platforms if compiler_options(platform)] == ["gpu", "cuda"]
    config, alone = configuration(), dataclasses.replace(MODEL, num_layers=1, windows=(None,))
    assert config.compiler_options("gpu") == compiler_options("gpu") and config.compiler_options("tpu") is None
    assert configuration(model=alone).compiler_options("gpu") is None


STACKS = stacks_of(model((6, 6, None) * 3 + (6, 6)))


@pytest.mark.parametrize("alike", [None, (0,) * 11, (0, 0, 0, *(1,) * 8), (0,) * 10 + (1,)])
def test_what_runs_through_stacks_meets_every_layer_in_order(alike):
    """What it carries is folded in that order, what each tells stands in it, and each meets its own value."""
    scanned, entries, values = [], np.arange(22.0).reshape(2, 11), [jnp.int32(100 * number) for number in range(11)]

    def run(layer, carried):
        scanned.append(not isinstance(layer.number, int))
        number = layer.of(entries, axis=1)[0].astype(jnp.int32)
        hundreds = layer.own(values).part(lambda one: one + 1).call(lambda one, x: one - x, 1)
        return carried * 2 % 1009 + number, {"number": number, "of": jnp.stack([number**2, hundreds])}

    carried, outputs = through(STACKS, alike, run, jnp.int32(1))
    expected = 1
    for number in range(11):
        expected = expected * 2 % 1009 + number
    assert int(carried) == expected
    assert any(scanned) == (alike is not None) == any(isinstance(one, Turns) for one in outputs)
    numbers = np.arange(11)
    found = by_layer(outputs, lambda one: one["of"], axis=1)
    np.testing.assert_array_equal(found, np.stack([numbers**2, 100 * numbers]))
    in_order = folded(outputs, lambda sofar, one: sofar * 2 % 1009 + one["number"], jnp.int32(1))
    assert int(in_order) == expected
