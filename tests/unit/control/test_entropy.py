"""Entropy: moments against the formulas, shards against all logits, intervals against every tail."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from exact import log_softmax, surprisal_moments
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import entropy as e

FINITE = st.floats(-30, 30, width=32)
ABSENT = st.sampled_from([float("-inf")])
# The first token is always there, so that a distribution exists; any other may be absent.
LOGITS = st.tuples(
    hnp.arrays(np.float32, (3, 1), elements=FINITE), hnp.arrays(np.float32, (3, 16), elements=FINITE | ABSENT)
).map(lambda parts: np.concatenate(parts, axis=-1))
TEMPERATURE = st.floats(0.25, 4.0, width=32)
quick = settings(max_examples=40, deadline=None)

moments = jax.jit(e.moments)
merge = jax.jit(e.merge)
top_k = jax.jit(e.top_k, static_argnums=1)
tail_corrected = jax.jit(e.tail_corrected, static_argnums=(1, 2))


def shannon(p):
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


@quick
@given(LOGITS, TEMPERATURE, st.sampled_from([1, 7, 16]), st.booleans())
def test_entropy_and_varentropy_are_the_mean_and_variance_of_surprisal_also_from_shards(z, temperature, cut, empty):
    heat = jnp.full(3, temperature, jnp.float32)
    shards = [z[:, :cut], z[:, cut:]] + ([np.full((3, 5), -np.inf, np.float32)] if empty else [])
    parts = [moments(shard, heat) for shard in shards]
    mean, variance = surprisal_moments(z, temperature)
    log_normaliser = np.log(np.exp(z.astype(np.float64) / temperature).sum(-1))
    for m in (
        moments(z, heat),
        *(functools.reduce(lambda a, b: merge(a, b, heat), order) for order in (parts, parts[::-1])),
    ):
        np.testing.assert_allclose(e.entropy(m), mean, atol=2e-5)
        np.testing.assert_allclose(e.varentropy(m), variance, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(e.log_normaliser(m, heat), log_normaliser, atol=5e-5)


@st.composite
def tops(draw):
    """Return a whole distribution over 40 tokens, flat to peaked, likeliest first, and how many are listed."""
    sharpness = draw(st.floats(0.0, 20.0))
    p = np.exp(log_softmax(sharpness * draw(hnp.arrays(np.float64, 40, elements=st.floats(0, 1)))))
    return np.sort(p)[::-1], draw(st.sampled_from([1, 2, 13, 40]))


@settings(max_examples=60, deadline=None)
@given(tops())
def test_the_estimates_are_the_papers_formulas_and_the_interval_contains_the_entropy(top):
    p, k = top
    mass = p[:k].sum()
    rest = 1 - mass if k < 40 else 0.0
    truncated = shannon(p[:k] / mass)
    upper = mass * truncated + shannon(np.array([mass, rest])) + rest * np.log(max(40 - k, 1))
    listed = jnp.asarray(np.log(p[:k]), jnp.float32)
    lower = top_k(listed, 40)
    corrected, half, none = (tail_corrected(listed, 40, share) for share in (1.0, 0.5, 0.0))
    np.testing.assert_allclose(lower.entropy, truncated, atol=2e-5)
    np.testing.assert_allclose(corrected.entropy, upper, atol=2e-5)
    assert corrected.entropy >= lower.entropy - 2e-5 and lower.entropy <= lower.low + 1e-4  # for rounding
    np.testing.assert_allclose(half.entropy, (none.entropy + corrected.entropy) / 2, rtol=1e-6)
    for estimate in (lower, corrected, half):
        assert estimate.low - 1e-5 <= shannon(p) <= estimate.high + 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), lower, top_k(listed[::-1], 40))


def allowed(entropy: float, k: int, size: int, error: float = 0.0) -> float:
    """What an end of the interval may move by for rounding, k of `size` tokens listed, each off by `error` nats."""
    off = error + (2 * (entropy + 2) + min(k, 64) + 4) * 2.0**-24
    return off * (2 * np.log(size) + 3 - np.log(off))


def test_the_margin_is_the_lead_of_the_likeliest_and_near_zero_temperature_nothing_is_uncertain():
    z = jnp.asarray([[1.0, 4.0, 2.5], [3.0, 0.0, 3.0], [-jnp.inf, 0.0, -1.0]])
    np.testing.assert_allclose(e.margin(z, e.moments(z)), [1.5, 0.0, 1.0])
    for temperature in (1e-30, 2e-38, 1e-39):
        m = e.moments(jnp.array([0.0, -5.0, -1000.0]), jnp.float32(temperature))
        assert (e.entropy(m), e.varentropy(m)) == (0.0, 0.0)


def greatest(p: np.ndarray, k: int) -> float:
    """The greatest entropy of a distribution with these k likeliest tokens: the rest shared evenly. In float64."""
    left = p[k:].sum()
    return shannon(p[:k]) + shannon(np.array([left])) + left * np.log(max(len(p) - k, 1))


def least(p: np.ndarray, k: int) -> float:
    """The least: the rest on as few tokens as may hold it, each no likelier than those listed. In float64."""
    left, most = p[k:].sum(), p[k - 1]
    full = int(left // most) if most > 0.0 else 0
    return shannon(p[:k]) + full * shannon(np.array([most])) + shannon(np.array([max(left - full * most, 0.0)]))


SHAPES = {
    "one above the rest": lambda size, scale, rng: np.where(np.arange(size) == 0, 4 * scale, 0.0),
    "normal": lambda size, scale, rng: scale / 3 * rng.normal(size=size),
    "falling": lambda size, scale, rng: -np.arange(size) / (scale * scale + 0.1),
    "few": lambda size, scale, rng: np.where(np.arange(size) < 3, 0.0, -2 * scale),
}
LISTED = (1, 64, 1000)


@jax.jit
def log_probs(z):
    """Log-probabilities from the peak, less the normaliser, by JAX, and by JAX in the dtype of the logits."""
    m, whole = e.moments(z), z.astype(jnp.float32)
    made = [e.log_probabilities(z, m), whole - e.log_normaliser(m)[..., None]]
    return m, [*made, jax.nn.log_softmax(whole), jax.nn.log_softmax(z)]


@jax.jit
def estimates(log_prob, m):
    """By each number of tokens listed, the estimates of both estimators."""
    return [(k, make(k)(log_prob, m)) for k in LISTED for make in (e.TopKEstimator, e.TailCorrectedEstimator)]


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([2, 300, 152_064]),
    shape=st.sampled_from(list(SHAPES)),
    scale=st.floats(0.0, 15.0),
    offset=st.sampled_from([0.0]) | st.floats(-1e4, 1e4),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 100),
)
@example(size=152_064, shape="one above the rest", scale=5.0, offset=1e4, dtype=jnp.float32, seed=0)
@example(size=131_072, shape="one above the rest", scale=3.0, offset=3e3, dtype=jnp.float32, seed=0)
@example(size=152_064, shape="falling", scale=10.0, offset=0.0, dtype=jnp.bfloat16, seed=0)
@example(size=152_064, shape="normal", scale=10.0, offset=0.0, dtype=jnp.float32, seed=0)
@example(size=300, shape="falling", scale=3.0, offset=0.0, dtype=jnp.float32, seed=0)
def test_the_interval_contains_the_entropy_of_logits_of_any_size_and_is_hardly_wider(
    size, shape, scale, offset, dtype, seed
):
    """Whatever all logits have in common, and however they become log-probabilities.

    Without an offset, of a likeliest logit m, it is wider than the sharpest by 2^-24 (4 m + 4 log V + 132) in each
    log-probability, 0.0012 nats at the most.
    """
    z = jnp.asarray(SHAPES[shape](size, scale, np.random.default_rng(seed)) + offset, jnp.float32).astype(dtype)
    exact = np.asarray(z.astype(jnp.float32))
    truth, _ = surprisal_moments(exact)
    p = np.sort(np.exp(log_softmax(exact)))[::-1]
    error = (4 * abs(exact.max()) + 4 * np.log(size) + 132) * 2.0**-24
    ordinary = offset == 0.0 and scale <= 10.0 and dtype == jnp.float32 and size > 2
    m, made = log_probs(z)
    for log_prob in made:
        for k, found in estimates(log_prob, m):
            assert found.low <= truth <= found.high
            assert found.low >= 0.0 and found.high <= np.log(size) * (1 + 1e-6)
            if ordinary:
                k = min(int(k), size)
                margin = allowed(greatest(p, k), k, size, error)
                assert margin < 0.0012
                assert found.high - found.low <= greatest(p, k) - least(p, k) + 4 * margin
