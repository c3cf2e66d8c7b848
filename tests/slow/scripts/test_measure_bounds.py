"""The oracle opens the least set, every bound holds, estimates obey formulas."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from head_of_keys import LENGTH, PAGE_SIZE, POSITION, blocks, head, weights
from scripts_here import script

from et_jax.control.view import tolerating


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tolerance", [0.5, 0.1, 0.01])
def test_the_oracle_opens_the_least_set(seed, tolerance):
    query, key, value = head(seed)
    bounds = script("measure_bounds")
    seen = blocks(query, key, value)
    exact = bounds.intervals(seen)["exact"]
    selector = bounds.Certified(lambda _: exact, slack=0.0)
    opened = np.asarray(selector(tolerating(seen.view, jnp.float32(tolerance))))
    mass = weights(query, key).reshape(-1, PAGE_SIZE).sum(-1)
    tail = POSITION // PAGE_SIZE  # which is read in any case
    allowed = [
        chosen
        for chosen in itertools.product([False, True], repeat=len(mass))
        if chosen[tail] and mass[~np.array(chosen)].sum() <= tolerance * mass.sum()
    ]
    assert opened.sum() == min(map(sum, allowed))
    assert tuple(opened.tolist()) in allowed


def test_every_bound_holds_the_true_mass():
    seen = blocks(*head(seed=5, group=2))
    for name, interval in script("measure_bounds").intervals(seen).items():
        assert np.all(interval.low <= seen.log_mass + 1e-4), name
        assert np.all(interval.high >= seen.log_mass - 1e-4), name


def test_what_is_left_of_the_output_follows_its_formula():
    query, key, value = head(seed=1)
    bounds = script("measure_bounds")
    errors = np.asarray(bounds.residual_errors(blocks(query, key, value)))
    weight = weights(query, key)[0].reshape(-1, PAGE_SIZE)
    held = (np.arange(LENGTH) <= POSITION).reshape(-1, PAGE_SIZE, 1)
    key, value = (np.where(held, x.reshape(-1, PAGE_SIZE, 8), 0).astype(np.float64) for x in (key, value))
    count, mass = held.sum(1), weight.sum(1)[:, None]
    part, mean_value = (weight[..., None] * value).sum(1), value.sum(1) / count
    guess = count * np.exp(key.sum(1) / count @ query[0].astype(np.float64))[:, None]
    whole = part.sum(0) / mass.sum()
    for i, share in enumerate(bounds.SHARES):
        opened = np.zeros((len(mass), 1), bool)
        opened[np.argsort(-mass[:, 0])[: int(np.ceil(share * len(mass)))]] = True
        for j, rest in enumerate((0 * mass, guess, mass)):
            numerator = np.where(opened, part, rest * mean_value).sum(0)
            output = numerator / np.where(opened, mass, rest).sum()
            expected = np.linalg.norm(output - whole) / np.linalg.norm(whole)
            np.testing.assert_allclose(errors[i, j], expected, rtol=1e-3)
