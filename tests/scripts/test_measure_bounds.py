"""Real keys as blocks: the captured pass is the model's, the oracle opens the least set, estimates obey formulas."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits

from et_jax.errors import UsageError
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise
from et_jax.types import replace

TINY = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    windows=(None, None),
)
PAGE_SIZE, LENGTH, POSITION = 4, 32, 29


def head(seed=0, spread=3.0, group=1):
    """One KV head's scaled queries, keys and values."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=shape) for shape in ((group, 8), (LENGTH, 8), (LENGTH, 8)))
    return tuple(np.asarray(x, np.float32) for x in (query * spread / 8**0.5, key, value))


def blocks(script, *arrays):
    at = script("block_views").blocks_at
    return at(*map(jnp.asarray, arrays), jnp.int32(POSITION), PAGE_SIZE)


def weights(query, key):
    """Return e^s of every key up to the position, in float64; 0 for those after it."""
    seen = np.exp(query.astype(np.float64) @ key.T.astype(np.float64))
    return np.where(np.arange(LENGTH) <= POSITION, seen, 0.0)


def test_the_captured_pass_gives_the_models_logits(script):
    params = initialise(TINY, jax.random.key(0))
    tokens = jnp.arange(LENGTH, dtype=jnp.int32) % TINY.vocab_size
    logits, layers = script("block_views").capture(TINY, params, tokens)
    np.testing.assert_allclose(logits, dense_logits(TINY, params, tokens[None])[0], rtol=1e-5, atol=1e-5)
    assert [tuple(x.shape for x in layer) for layer in layers] == [((32, 4, 8), (32, 2, 8), (32, 2, 8))] * 2


def test_a_model_with_windows_is_refused(script):
    windowed = dataclasses.replace(TINY, windows=(None, 16))
    params = initialise(windowed, jax.random.key(0))
    with pytest.raises(ValueError, match="sliding window"):
        script("block_views").capture(windowed, params, jnp.zeros(8, jnp.int32))


def test_blocks_add_up_to_attention(script):
    query, key, value = head(group=2)
    seen, weight = blocks(script, query, key, value), weights(query, key)
    np.testing.assert_allclose(seen.output.sum(1), weight / weight.sum(1, keepdims=True) @ value, rtol=1e-4, atol=1e-5)
    with np.errstate(divide="ignore"):
        log_mass = np.log(weight.reshape(2, -1, PAGE_SIZE).sum(-1))
    np.testing.assert_allclose(seen.log_mass, log_mass, rtol=1e-5)
    assert seen.view.num_tokens.tolist() == [4] * 7 + [2]
    np.testing.assert_array_equal(seen.view.key_max[7], key[28:30].max(0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tolerance", [0.5, 0.1, 0.01])
def test_the_oracle_opens_the_least_set(script, seed, tolerance):
    query, key, value = head(seed)
    bounds = script("measure_bounds")
    seen = blocks(script, query, key, value)
    exact = bounds.intervals(seen)["exact"]
    selector = bounds.certified(lambda _: exact, slack=0.0)
    opened = np.asarray(selector(replace(seen.view, tolerance=jnp.float32(tolerance))))
    mass = weights(query, key).reshape(-1, PAGE_SIZE).sum(-1)
    allowed = [
        chosen
        for chosen in itertools.product([False, True], repeat=len(mass))
        if mass[~np.array(chosen)].sum() <= tolerance * mass.sum()
    ]
    assert opened.sum() == min(map(sum, allowed))
    assert tuple(opened.tolist()) in allowed


def test_every_bound_holds_the_true_mass(script):
    seen = blocks(script, *head(seed=5, group=2))
    for name, interval in script("measure_bounds").intervals(seen).items():
        assert np.all(interval.low <= seen.log_mass + 1e-4), name
        assert np.all(interval.high >= seen.log_mass - 1e-4), name


def test_what_is_left_of_the_output_follows_its_formula(script):
    query, key, value = head(seed=1)
    bounds = script("measure_bounds")
    errors = np.asarray(bounds.residual_errors(blocks(script, query, key, value)))
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


def test_stories_are_parted_by_single_line_breaks(script, tmp_path):
    (tmp_path / "stories.txt").write_text("One.\n\nStill one.\nTwo.\n")
    held_out = script("held_out")
    assert held_out.texts(tmp_path / "stories.txt") == ["One.\n\nStill one.", "Two."]
    with pytest.raises(UsageError, match="is not there"):
        held_out.texts(tmp_path / "absent.txt")
