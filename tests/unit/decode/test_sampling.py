"""Thresholds against sorting, the race against itself in float64, penalties against their formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.entropy import moments
from et_jax.decode.faults import overflows
from et_jax.decode.sampling import settings as sampling
from et_jax.decode.sampling.noise import race_noise
from et_jax.decode.sampling.truncation import truncate
from et_jax.types import replace

ROWS = 4
VOCABULARIES = (7, 300)
OFF = -np.inf


def asked(**given) -> sampling.Sampling:
    """Settings of every row at temperature 1, of which all is off but what is given."""
    off, given = sampling.plain((ROWS,)), {"temperature": 1.0} | given
    given = {name: jnp.asarray(number, getattr(off, name).dtype) for name, number in given.items()}
    return replace(off, **{name: jnp.broadcast_to(number, ROWS) for name, number in given.items()})


@functools.cache
def compiled(name: str):
    """One program per function and shape, whatever the examples."""
    return jax.jit(truncate if name == "truncate" else getattr(sampling, name))


def truncated(logits, given: sampling.Sampling, least=OFF, own=None):
    """What is left of logits, which a model's own may have become otherwise."""
    logits, least = jnp.asarray(logits), jnp.broadcast_to(jnp.asarray(least, jnp.float32), len(logits))
    own = logits if own is None else jnp.asarray(own)
    return jax.device_get(compiled("truncate")(logits, given.temperature, given, least, own))


def cut_of(logits, given: sampling.Sampling, least=OFF):
    return truncated(logits, given, least).cut


def kept_by(logits, **given):
    left = truncated(logits, asked(**given))
    return (left.logits >= left.cut[:, None]) & ~np.isneginf(left.logits)


def keys(seed: int) -> np.ndarray:
    """The same key in every row."""
    return np.tile(np.asarray([0, seed], np.uint32), (ROWS, 1))


def draw(logits, temperature, cut, key, position):
    heat, cut = (np.broadcast_to(np.asarray(x, np.float32), len(logits)) for x in (temperature, cut))
    position = np.broadcast_to(np.asarray(position, np.int32), len(logits))
    return np.asarray(compiled("sample_token")(jnp.asarray(logits, jnp.float32), heat, cut, key, position))


def probabilities(row, temperature=1.0, cut=OFF):
    z = np.asarray(row, np.float64) / temperature
    weight = np.where(np.asarray(row) >= cut, np.exp(z - z.max()), 0.0)
    return weight / weight.sum()


# Ties are frequent, some tokens are impossible, and magnitudes reach where float32 steps by hundreds. Subnormal logits
# are left out: XLA on a CPU takes them for 0.
some_logit = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-20, 20, width=32, allow_subnormal=False),
    st.floats(-(2.0**30), 2.0**30, width=32, allow_subnormal=False),
    st.just(-np.inf),
)


@st.composite
def rows_of_logits(draw, logit=some_logit):
    size = draw(st.sampled_from(VOCABULARIES))
    few = draw(st.lists(st.tuples(logit, logit, logit, logit), min_size=1, max_size=12))
    order = np.random.default_rng(draw(st.integers(0, 99))).integers(0, len(few), size)
    rows = np.asarray(few, np.float32)[order].T
    rows[:, 0] = np.where(np.isneginf(rows).all(axis=1), 0.0, rows[:, 0])  # some token is always possible
    return rows


@settings(max_examples=60)
@given(rows_of_logits(), st.tuples(*[st.integers(1, 310)] * ROWS))
def test_top_k_is_the_kth_greatest_logit(logits, k):
    size = logits.shape[1]
    expected = [np.sort(row)[::-1][count - 1] if count < size else OFF for row, count in zip(logits, k, strict=True)]
    np.testing.assert_array_equal(cut_of(logits, asked(top_k=np.asarray(k))), expected)


@settings(max_examples=60)
@given(
    rows_of_logits(),
    st.tuples(*[st.floats(0.01, 0.999)] * ROWS),
    st.floats(0.25, 4, width=32),
    st.sampled_from([0, 1, 3, 50]),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_among_what_top_k_kept(logits, p, temperature, k):
    """Tied tokens go together, so the set is a prefix of the distinct logits in falling order."""
    given = asked(top_p=np.asarray(p), temperature=temperature, top_k=k)
    slack = 1e-5  # of sums in float32
    for row, share, cut in zip(logits, p, cut_of(logits, given), strict=True):
        floor = np.sort(row)[::-1][k - 1] if 0 < k < len(row) else OFF
        mass = probabilities(row, temperature, floor)
        assert cut in row or cut == OFF
        kept = mass[row >= cut].sum()
        assert kept >= share - slack
        above = mass[row > cut].sum()
        assert above < share + slack or cut == floor


@settings(max_examples=40)
@given(rows_of_logits(), st.tuples(*[st.floats(0.01, 1)] * ROWS), st.floats(0.25, 4, width=32))
def test_min_p_keeps_what_is_at_least_that_fraction_of_the_likeliest(logits, share, temperature):
    cut = cut_of(logits, asked(min_p=np.asarray(share), temperature=temperature))
    for row, fraction, least in zip(logits, share, cut, strict=True):
        ratio = np.exp((row.astype(np.float64) - row.max()) / temperature)
        close = np.abs(row - row.max() - temperature * np.log(fraction)) < 1e-5 * (1 + np.abs(row.max()))
        np.testing.assert_array_equal((row >= least)[~close], (ratio >= fraction)[~close])


def greatest_first(x):
    """The numbers of tokens by falling `x`, those that tie side by side."""
    return np.split(order := np.argsort(-x, kind="stable"), np.flatnonzero(np.diff(x[order])) + 1)


def by_definition(row, temperature, name, number):
    """Of one row, which tokens a truncation keeps and which are too near to its border to tell in float32."""
    p = probabilities(row, temperature)
    with np.errstate(divide="ignore"):
        surprisal = -np.log(p)
    possible = p > 0
    entropy = float(np.sum(p[possible] * surprisal[possible]))
    if name == "top_h":
        kept = np.zeros(len(p), bool)
        for tied in greatest_first(row):
            q = np.where(kept, p, 0.0)
            q[tied] = p[tied]
            q = q[q > 0] / q.sum()
            bound = number * entropy
            if kept.any() and -np.sum(q * np.log(q)) > bound:
                return kept, (np.arange(len(p)) == tied[0]) & (abs(-np.sum(q * np.log(q)) - bound) < 1e-4)
            kept[tied] = True
        return kept, np.zeros(len(p), bool)
    if name == "min_k":
        z = np.sort(row[possible].astype(np.float64))[::-1]
        falls = (z[:-1] - z[1:]) / np.arange(1, len(z))
        cliff = int(np.argmax(falls)) + 1 if len(z) > 1 else 1
        fewest = min(int(number / (z[0] - z[-1])), len(z)) if z[0] > z[-1] else len(z)
        near = np.flatnonzero(falls > falls.max(initial=0) * (1 - 1e-5)) + 1
        borders = z[np.append(np.maximum(near, fewest), max(cliff, fewest)) - 1]
        return row >= borders[-1], (row < borders.max()) & (row >= borders.min())
    if name == "typical_p":
        distance = np.where(possible, np.abs(surprisal - entropy), np.inf)
        kept, mass = np.zeros(len(p), bool), 0.0
        for tied in greatest_first(-distance):
            kept[tied] = True
            mass += p[tied].sum()
            if mass >= number:
                break
        last = distance[kept].max()
        return kept, np.abs(distance - last) < 1e-3 * (1 + last)
    least = {
        "eta_cutoff": lambda: -np.log(min(number, np.sqrt(number) * np.exp(-entropy))),
        "p_less": lambda: -np.log(np.sum(p**2)),
    }
    if name == "top_n_sigma":
        z = row[~np.isneginf(row)].astype(np.float64)
        border = row.max() - number * z.std()
        return row >= border, np.abs(row - border) < 1e-4 * (1 + np.abs(border))
    border = least[name]()
    return surprisal <= border, np.abs(surprisal - border) < 1e-3 * (1 + abs(border))


@settings(max_examples=40)
@given(
    rows_of_logits(st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32, allow_subnormal=False))),
    st.sampled_from([("top_n_sigma", 1.0), ("top_n_sigma", 0.3), ("eta_cutoff", 0.0009), ("eta_cutoff", 0.3)])
    | st.sampled_from([("min_k", 3.0), ("min_k", 100.0), ("min_k", 2000.0)])
    | st.sampled_from([("top_h", 0.4), ("top_h", 0.9), ("typical_p", 0.95), ("typical_p", 0.2), ("p_less", True)]),
    st.floats(0.25, 4, width=32),
)
def test_a_truncation_by_entropy_keeps_what_its_definition_keeps(logits, truncation, temperature):
    name, number = truncation
    kept = kept_by(logits, temperature=temperature, **{name: number})
    for row, got in zip(logits, kept, strict=True):
        expected, close = by_definition(row, temperature, name, number)
        expected |= (row == row.max()) & ~expected.any()
        np.testing.assert_array_equal(got[~close], expected[~close])
        assert got.any()


def test_truncations_by_entropy_are_each_rows_own():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]] * ROWS).astype(np.float32)
    given = dict(top_n_sigma=[0.6, 0, 0, 0], typical_p=[1, 0.25, 1, 1], top_h=[0, 0, 0.6, 0], p_less=[0, 0, 0, 1])
    kept = kept_by(logits, **given)
    two = [True, True, False, False]
    assert kept.tolist() == [two, [False, True, False, False], two, two]
    assert np.all(kept_by(logits, temperature=0.0, **given))


def test_deviations_are_those_of_the_models_own_logits():
    own = np.random.default_rng(0).normal(size=(ROWS, 300)).astype(np.float32)
    own[:, 7] = 0.0
    banned = own.copy()
    banned[:, 7] = -1e6
    left = truncated(banned, asked(top_n_sigma=1.0), own=own)
    np.testing.assert_allclose(left.cut, own.max(1) - own.std(1), rtol=1e-5)


def test_the_strictest_of_all_holds_and_a_token_is_always_left():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]] * ROWS).astype(np.float32)
    given = asked(top_k=[3, 0, 0, 0], top_p=[1, 0.5, 1, 1], min_p=[0, 0, 0.6, 0])
    least = np.asarray([OFF, OFF, OFF, np.log(0.15)], np.float32)
    kept = logits >= cut_of(logits, given, least=least)[:, None]
    assert kept.sum(axis=1).tolist() == [3, 2, 2, 3]
    all_of_them = asked(top_k=3, top_p=0.5, min_p=0.6)
    assert (logits >= cut_of(logits, all_of_them)[:, None]).sum(axis=1).tolist() == [2] * ROWS
    strict = cut_of(logits, asked(top_p=1e-9, min_p=1.0), least=10.0)
    np.testing.assert_array_equal(strict, logits.max(axis=1))


def test_a_greedy_row_ignores_truncation_and_rows_that_ask_for_nothing_are_not_cut():
    logits = np.random.default_rng(0).normal(size=(ROWS, 300)).astype(np.float32)
    cut = cut_of(logits, asked(top_k=2, top_p=0.5, min_p=0.5, temperature=[0, 1, 0, 1]))
    assert np.isneginf(cut[[0, 2]]).all() and np.isfinite(cut[[1, 3]]).all()
    assert np.isneginf(cut_of(logits, asked())).all()


@settings(max_examples=60)
@given(rows_of_logits(), st.integers(0, 2**31), st.floats(0.25, 4, width=32), st.booleans())
def test_the_token_sampled_wins_the_race_of_its_noise(logits, seed, temperature, cuts):
    """The greatest log p - log E, in float64, of the tokens kept; rounding may let one in that is as good."""
    position = np.arange(seed % 1000, seed % 1000 + ROWS, dtype=np.int32)
    cut = np.median(logits, axis=1) if cuts else np.full(ROWS, OFF)
    key = keys(seed)
    clocks = np.asarray(race_noise(jnp.asarray(key), jnp.asarray(position), logits.shape[1]), np.float64)
    tokens = draw(logits, temperature, cut, key, position)
    for row, least, clock, token in zip(logits, cut, clocks, tokens, strict=True):
        with np.errstate(invalid="ignore", divide="ignore"):
            lead = np.where(row >= least, (row.astype(np.float64) - row.max()) / temperature - np.log(clock), OFF)
        assert row[token] >= least
        slack = 1e-5 * (1 + np.abs(row.max() - row[token]) / temperature)  # of float32
        assert lead[token] >= lead.max() - slack


def test_temperature_zero_takes_the_first_of_the_greatest_whatever_the_key():
    logits = np.zeros((ROWS, 300), np.float32)
    logits[:, [17, 250]] = 2.0
    for seed in range(5):
        assert draw(logits, 0.0, OFF, keys(seed), 3).tolist() == [17] * ROWS
        assert draw(logits, [0, 1, 0, 1], OFF, keys(seed), 3).tolist()[::2] == [17, 17]


def penalised(logits, in_prompt, counts, repetition, presence, frequency):
    """By the formulas, in float64."""
    x, seen = logits.astype(np.float64), in_prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


@settings(max_examples=30)
@given(
    repetition=st.floats(0.5, 2, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    seed=st.integers(0, 1000),
)
def test_penalties_are_their_formulas(repetition, presence, frequency, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, 20)).astype(np.float32)
    counts, in_prompt = rng.integers(0, 3, (ROWS, 20)), rng.random((ROWS, 20)) < 0.3
    given = asked(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    kept = sampling.TokenCounts(in_prompt=jnp.asarray(in_prompt), generated=jnp.asarray(counts, jnp.int32))
    expected = penalised(logits, in_prompt, counts, repetition, presence, frequency)
    np.testing.assert_allclose(compiled("penalise")(jnp.asarray(logits), given, kept), expected, rtol=1e-5, atol=1e-5)


PENALTIES = ("repetition", "presence", "frequency")
EXTREMES = {
    "repetition_penalty": (1.0, 1e-6, 1e6, 1e-38, 3e38),  # those that a request may ask for, and beyond
    "presence_penalty": (0.0, -1e6, 1e6, -3e38, 3e38),
    "frequency_penalty": (0.0, -1e6, 1e6, -3e38, 3e38),
    "temperature": (0.0, 5e-324, 1e-38, 1e-20, 1.0, 1e6, 3.4e38),
    "top_p": (1.0, 1e-6),
    "min_p": (0.0, 1.0),
}


@settings(max_examples=150)
@given(
    asks=st.fixed_dictionaries({name: st.sampled_from(some) for name, some in EXTREMES.items()}),
    scale=st.sampled_from((1.0, 1e-30, 1e4, 1e20, 1e38)),
    most=st.sampled_from((1, 2**20)),
    seed=st.integers(0, 99),
)
def test_what_overflows_is_told_and_what_does_not_is_drawn(asks, scale, most, seed):
    """At the edge of float32 a row is faulty, or its token is one of those that float64 gives a chance."""
    rng = np.random.default_rng(seed)
    logits = np.clip(rng.normal(0, 3, (ROWS, 20)) * scale, -3e38, 3e38).astype(np.float32)
    logits = np.where(rng.random((ROWS, 20)) < 0.2, -np.inf, logits)  # what a mask has ruled out
    counts = rng.integers(0, most + 1, (ROWS, 20)) * (rng.random((ROWS, 20)) < 0.3)
    in_prompt = rng.random((ROWS, 20)) < 0.3
    given, heat = asked(**asks), np.float32(asks["temperature"])
    kept = sampling.TokenCounts(in_prompt=jnp.asarray(in_prompt), generated=jnp.asarray(counts, jnp.int32))
    altered = compiled("penalise")(jnp.asarray(logits), given, kept)
    cut = cut_of(altered, given)
    token = draw(altered, asks["temperature"], cut, keys(seed), 5)
    warm = jnp.full(ROWS, heat if heat > 0 else 1.0, jnp.float32)
    faulty = np.asarray(overflows(moments(altered, warm)))
    allowed = all(1e-6 <= abs(asks[f"{name}_penalty"] or 1.0) <= 1e6 for name in PENALTIES)
    if allowed and scale <= 1e4 and (heat == 0 or 1e-20 <= heat <= 1e6):
        assert not faulty.any()
    repetition, presence, frequency = (np.float64(np.float32(asks[f"{name}_penalty"])) for name in PENALTIES)
    exact = penalised(logits, in_prompt, counts, repetition, presence, frequency)
    largest = np.abs(exact[np.isfinite(exact)]).max() + abs(frequency) * counts.max() + abs(presence)
    for row, one, bad in zip(exact, token, faulty, strict=True):  # of float32, and of a race: e^-120 is no chance
        assert bad or row.max() - row[one] <= 1e-5 * largest + 120 * max(float(heat), 1e-37), (asks, scale, row, one)


def test_counts_grow_where_a_token_was_produced_and_a_folded_key_differs_by_number_and_in_nothing_else():
    start = sampling.TokenCounts(in_prompt=jnp.zeros((3, 5), bool), generated=jnp.ones((3, 5), jnp.int32))
    after = sampling.count(start, None, jnp.asarray([4, 0, 4]), jnp.asarray([True, False, True]))
    expected = np.ones((3, 5))
    expected[[0, 2], 4] = 2
    np.testing.assert_array_equal(after.generated, expected)
    np.testing.assert_array_equal(after.in_prompt, start.in_prompt)
    one = jax.tree.map(lambda x: x[0], asked(temperature=0.5))
    folded = [sampling.fold_key(one, jnp.int32(i)) for i in range(3)]
    assert len({tuple(f.key.tolist()) for f in [one, *folded]}) == 4
    again = replace(folded[0], key=one.key)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(one), strict=True))


def test_what_nobody_asks_for_is_in_a_branch_of_its_own():
    """XLA takes out of a loop what no trip changes, and a search for a cut would be made without a trip too."""
    logits, numbers = jnp.zeros((ROWS, 512)), jnp.ones(ROWS)
    text = jax.jit(truncate).lower(logits, numbers, asked(top_k=1), numbers, logits).compile().as_text() or ""
    _, entry = text.split("ENTRY ")
    assert "conditional(" in entry and "while(" in text and "while(" not in entry
