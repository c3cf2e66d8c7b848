"""The noise of sampling: its bits, its distribution, and what it depends on.

Shares that chance decides are compared within five standard errors; the numbers are fixed by their keys.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.sampling import noise
from et_jax.decode.sampling import settings as sampling

SIGMAS = 5.0


def keys(rows: int, first: int = 0) -> np.ndarray:
    """Key data of consecutive seeds, as requests have them."""
    return np.stack([np.zeros(rows, np.uint32), first + np.arange(rows, dtype=np.uint32)], axis=1)


bits_of, noise_of = (jax.jit(one, static_argnums=2) for one in (noise.random_bits, noise.race_noise))


def test_every_bit_depends_on_every_bit_of_key_position_and_token():
    """A flipped input bit flips each output bit half the time, and no two output bits together more often."""
    rows, size = 16, 1024
    rng = np.random.default_rng(0)
    key, position = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32), rng.integers(0, 2**20, rows).astype(np.int32)
    before = np.asarray(bits_of(key, position, size))
    token = np.arange(size)
    flipped = [before[:, token ^ (1 << bit)] for bit in range(10)]
    flipped += [bits_of(key, position ^ np.int32(1 << bit), size) for bit in range(20)]
    for word, bit in itertools.product(range(2), range(32)):
        other = key.copy()
        other[:, word] ^= np.uint32(1 << bit)
        flipped.append(bits_of(other, position, size))
    bound = SIGMAS * np.sqrt(2 / before.size)  # a token and its partner are counted twice
    for after in flipped:
        alone, together = changes(before, after)
        assert np.abs(alone).max() < bound
        assert np.abs(together - np.eye(32)).max() < bound


@jax.jit
def changes(before, after):
    """The mean of every bit's change, -1 where it never changes and 1 where always, and of every two bits' product."""
    bits = (before ^ after)[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    change = (2.0 * bits.astype(jnp.float32) - 1.0).reshape(-1, 32)
    return change.mean(axis=0), change.T @ change / len(change)


def test_the_least_of_many_is_exponential_down_to_its_last_bits():
    """The least of n numbers is exponential with rate n; with 24 bits, one in 300 would be shared by two tokens."""
    size, positions = 49_157, 4096
    least, shared = [], 0
    for start in range(0, positions, 64):
        key = np.broadcast_to(keys(1, 5), (64, 2))
        numbers = np.asarray(noise_of(key, np.arange(start, start + 64, dtype=np.int32), size))
        least.append(numbers.min(axis=1))
        shared += int((numbers == numbers.min(axis=1, keepdims=True)).sum()) - 64
    assert shared == 0
    below = np.sort(-np.expm1(-size * np.concatenate(least).astype(np.float64)))
    steps = np.arange(positions + 1) / positions
    distance = max(np.abs(below - steps[:-1]).max(), np.abs(below - steps[1:]).max())
    assert distance < 2.4 / np.sqrt(positions)  # Kolmogorov's distribution, one run in 50,000


def test_exponential_is_its_formula_positive_finite_and_falls_nowhere():
    """Near 0, where races are won, to float32's own rounding; at the other end to the 24 bits of 1 - u."""
    rng = np.random.default_rng(0)
    some = [np.arange(4096), 2 ** np.arange(32, dtype=np.int64), 2**32 - 1 - np.arange(4096), [2**32 - 1]]
    bits = np.unique(np.concatenate([*some, rng.integers(0, 2**32, 100_000)]))
    ours = np.asarray(noise.exponential(jnp.asarray(bits, jnp.uint32)), np.float64)
    quantile = (bits + 0.5) / 2.0**32
    expected = -np.log1p(-quantile)
    assert np.isfinite(ours).all() and ours.min() == 2.0**-33 and (np.diff(ours) >= 0).all()
    assert (np.diff(ours[:4096]) > 0).all()
    lower = quantile < 0.5
    np.testing.assert_allclose(ours[lower], expected[lower], rtol=4e-7)
    inner = quantile < 1 - 2.0**-20
    np.testing.assert_allclose(-np.expm1(-ours[inner]), quantile[inner], rtol=0, atol=2.0**-23)
    assert 16 < ours.max() < 17


def test_noise_depends_on_key_position_and_token_alone():
    """Not on the vocabulary, the row's place or its company: each bit for bit, at sizes of every remainder."""
    key = keys(16, 100)
    position = np.asarray([7, 7, 8, 2**30, *range(12)], np.int32)
    everything = np.asarray(noise_of(key, position, 5003))
    for size in (1, 7, 31, 300, 4097, 5002):
        np.testing.assert_array_equal(noise_of(key, position, size), everything[:, :size])
    for rows in (1, 2, 3, 7):
        np.testing.assert_array_equal(noise_of(key[:rows], position[:rows], 5003), everything[:rows])
    order = np.random.default_rng(0).permutation(16)
    np.testing.assert_array_equal(noise_of(key[order], position[order], 5003), everything[order])
    assert len(np.unique(everything, axis=0)) == 16
    words = np.asarray(bits_of(np.tile(keys(1), (4, 1)), np.arange(4, dtype=np.int32), 50_000))
    assert [len(np.unique(row)) for row in words] == [50_000] * 4  # tokens share no word


def test_greedy_rows_make_no_noise():
    """The noise is inside a conditional, which greedy rows do not enter."""
    given = (np.zeros((2, 9), np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32))
    program = jax.make_jaxpr(sampling.sample_token)(*given, keys(2), np.zeros(2, np.int32))
    outside = {equation.primitive.name for equation in program.jaxpr.eqns}
    assert "cond" in outside and not {"log1p", "exp", "mul", "random_fold_in"} & outside
