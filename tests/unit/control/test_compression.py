"""What is kept of a cache and when: against NumPy written out, and against numbers worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import kept_entries
import numpy as np
import pytest

from et_jax.control import compression
from et_jax.control.compression import Compression, named
from et_jax.control.policies import POLICIES, AdaKV, Entries, Latent, PyramidKV, Random, Streaming, attention_mass
from et_jax.softmax import Softmax
from et_jax.types import replace

PAGE, BUDGET, WINDOW, HEADS, GROUP, DIM = 4, 16, 6, 3, 2, 8
PLACES, COUNT = 60, 51
HOW = partial(named, budget=BUDGET, window=WINDOW)
WINDOWS = (None,) * 4


def entries(seed: int, layer: int = 0, first: tuple[int, ...] = (0,) * HEADS) -> Entries:
    """Random keys and queries; what stands beyond the entries are no numbers, and the queries are in a ring."""
    drawn = np.random.default_rng(seed)
    keys = drawn.normal(size=(HEADS, PLACES, DIM)).astype(np.float32)
    keys[1] *= 3.0  # a head that attends to few
    keys[:, COUNT:] = np.nan
    queries = drawn.normal(size=(WINDOW, HEADS * GROUP, DIM)).astype(np.float32)
    at = np.roll(np.arange(COUNT - WINDOW, COUNT), 2).astype(np.int32)
    return Entries(
        keys=jnp.asarray(keys),
        first=jnp.asarray(first, jnp.int32),
        count=jnp.int32(COUNT),
        queries=jnp.asarray(np.roll(queries, 2, axis=0)),
        at=jnp.asarray(at),
        softmax=Softmax(scale=DIM**-0.5),
        layer=layer,
    )


def written_out(name: str, given: Entries, budget: int = BUDGET) -> list[list[int]]:
    firsts = given.first.tolist()
    keys = [np.asarray(given.keys[head, first:COUNT]) for head, first in enumerate(firsts)]
    queries = np.asarray(given.queries)[np.argsort(np.asarray(given.at))]
    found = kept_entries.kept(name, keys, queries, budget=budget, window=WINDOW, pooling=5, page=PAGE)
    return [[first + place for place in each] for first, each in zip(firsts, found, strict=True)]


def chosen(how: Compression, given: Entries) -> list[list[int]]:
    """The places kept; those that a head leaves out must stand first, whole blocks of them."""
    layout = how.layout(PAGE, WINDOWS)
    place = np.asarray(compression.kept(given, how, layout, PAGE))
    assert place.shape == (HEADS, layout.region * PAGE)
    for row in place:
        left_out = int((row < 0).sum())
        assert left_out % PAGE == 0 and (row[:left_out] == -1).all() and (np.diff(row[left_out:]) > 0).all()
    return [row[row >= 0].tolist() for row in place]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["latent", "snapkv", "adakv"])
def test_what_is_kept_is_what_is_written_out(name, seed):
    found = chosen(HOW(name), entries(seed))
    assert found == written_out(name, entries(seed))
    assert all(each[-WINDOW:] == list(range(COUNT - WINDOW, COUNT)) for each in found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["latent", "adakv"])
def test_what_was_left_out_before_is_not_kept_again(name, seed):
    """The first entry that a head holds draws every query, and what is beside it in vain."""
    given = entries(seed, first=(28, 20, 36))
    queries = np.asarray(given.queries).reshape(WINDOW, HEADS, GROUP, DIM).mean((0, 2))
    keys = given.keys.at[jnp.arange(HEADS), given.first].set(4.0 * queries)
    given = replace(given, keys=keys)
    assert chosen(HOW(name), given) == written_out(name, given)


@pytest.mark.parametrize("seed", range(4))
def test_a_split_keeps_the_sum_and_the_floor(seed):
    how = HOW("adakv")
    sizes = [len(each) for each in chosen(how, entries(seed))]
    assert sum(sizes) == HEADS * BUDGET and len(set(sizes)) > 1
    assert min(sizes) >= WINDOW + 0.2 * (BUDGET - WINDOW) and max(sizes) <= 2 * BUDGET


def test_a_split_hands_nothing_on_beyond_the_region():
    """One head has all of the layer's top entries: of three blocks a head it would take seven, and six are the most."""
    score = np.full((3, 40), 0.1, np.float32)
    score[0] = 1.0
    blocks = AdaKV(floor=0.0, most=2).head_blocks(jnp.asarray(score), 3, 6, 4, 4)
    assert blocks.tolist() == [6, 1, 1]


def test_a_pyramid_falls_in_equal_steps_and_keeps_the_sum():
    """Of 8 blocks 2 hold the window: 6 in the mean, from 11.7 down to 0.3 by 3.8, whole blocks up to each layer."""
    assert PyramidKV().layer_blocks(8, 2, 4) == (14, 10, 6, 2)
    assert PyramidKV(steepness=1.0).layer_blocks(8, 2, 3) == (8, 8, 8)
    assert PyramidKV().layer_blocks(5, 5, 2) == (5, 5) and PyramidKV().layer_blocks(8, 2, 1) == (8,)
    how = HOW("pyramidkv", budget=32)
    assert how.layout(PAGE, WINDOWS).layers == how.policy.layer_blocks(8, 2, 4)
    for layer, blocks in enumerate((14, 10, 6, 2)):
        given = entries(3, layer)
        if blocks * PAGE < COUNT:
            assert [len(each) for each in chosen(how, given)] == [blocks * PAGE] * HEADS


def test_layers_of_a_pyramid_keep_what_is_written_out():
    how = HOW("pyramidkv")
    assert how.layout(PAGE, WINDOWS).layers == (6, 5, 3, 2)
    for layer, blocks in enumerate((6, 5, 3, 2)):
        given = entries(5, layer)
        assert chosen(how, given) == written_out("latent", given, budget=blocks * PAGE)


def test_streaming_keeps_both_ends():
    given = entries(0)
    assert chosen(HOW("streaming"), given) == [[0, 1, 2, 3, *range(COUNT - BUDGET + 4, COUNT)]] * HEADS
    assert chosen(HOW("streaming", budget=12), given)[0] == [0, 1, 2, 3, *range(COUNT - 8, COUNT)]


def test_chance_keeps_the_window_and_differs_by_head_layer_and_seed():
    how = HOW("random")
    found = chosen(how, entries(0))
    assert all(len(each) == BUDGET and each[-WINDOW:] == list(range(COUNT - WINDOW, COUNT)) for each in found)
    others = [
        chosen(how, entries(0, 1)),
        chosen(Compression(budget=BUDGET, window=WINDOW, policy=Random(1)), entries(0)),
    ]
    assert found == chosen(how, entries(0)) and found[0] != found[1] and found not in others


def test_a_layer_with_a_sliding_window_keeps_the_last():
    how = HOW("latent")
    layout = how.layout(PAGE, (None, 9))
    assert layout.layers == (4, None)
    place = compression.kept(entries(0, 1), how, layout, PAGE)
    assert place.tolist() == [list(range(COUNT - BUDGET, COUNT))] * HEADS


def test_masses_are_those_written_out_and_sum_to_one():
    given = entries(2)
    queries = np.asarray(given.queries)[np.argsort(np.asarray(given.at))]
    mass = np.asarray(attention_mass(given))
    for head in range(HEADS):
        expected = kept_entries.masses(
            np.asarray(given.keys[head, :COUNT]), queries[:, head * GROUP : (head + 1) * GROUP]
        )
        np.testing.assert_allclose(mass[head, :COUNT], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mass.sum(1), 1.0, rtol=1e-5)
    assert not mass[:, COUNT:].any()


def test_each_query_sees_its_own_key_and_none_after_it():
    """As printed, the stored queries end a token before the newest key and are masked as if they ended with it.

    So each sees one key of its future. Here that key draws the newest stored query, and the entry that the query really
    attends to is forgotten.
    """
    d, n = 4, 12
    keys = np.zeros((1, n, d), np.float32)
    favourite, other, future = 2, 5, n - 1
    keys[0, favourite, 0] = keys[0, other, 1] = keys[0, future, 2] = 1.0
    queries = np.zeros((2, 1, d), np.float32)
    queries[0, 0, 1], queries[1, 0, 0], queries[1, 0, 2] = 6.0, 12.0, 40.0
    stored = np.array([n - 3, n - 2], np.int32)

    def keeps(at: np.ndarray) -> list[int]:
        given = Entries(
            keys=jnp.asarray(keys),
            first=jnp.zeros(1, jnp.int32),
            count=jnp.int32(n),
            queries=jnp.asarray(queries),
            at=jnp.asarray(at),
            softmax=Softmax(scale=d**-0.5),
            layer=0,
        )
        how = Compression(budget=3, window=2, pooling=1)
        return np.asarray(compression.kept(given, how, how.layout(1, (None,)), 1))[0].tolist()

    assert keeps(stored) == [favourite, n - 2, n - 1]
    assert keeps(stored + 1) == [other, n - 2, n - 1]  # as printed
    aligned = kept_entries.masses(keys[0, : n - 1], queries)
    printed = kept_entries.masses(keys[0], queries)
    assert aligned[favourite] > aligned[other] and printed[favourite] < printed[other]
    assert printed[future] > 0.4  # half of all mass, on a key that came later


def test_queries_of_a_group_share_what_is_kept():
    """As printed, every query head keeps entries of its own, of a cache that was spread out to all of them.

    So a group of two holds twice the budget for each KV head; here it is held once.
    """
    given = entries(4)
    ours = chosen(HOW("latent"), given)
    queries = np.asarray(given.queries)[np.argsort(np.asarray(given.at))]
    keys = [np.asarray(given.keys[head // GROUP, :COUNT]) for head in range(HEADS * GROUP)]
    printed = kept_entries.kept("latent", keys, queries, budget=BUDGET, window=WINDOW, pooling=5, page=PAGE)
    assert sum(map(len, ours)) == HEADS * BUDGET
    assert sum(map(len, printed)) == GROUP * HEADS * BUDGET
    assert any(printed[GROUP * head] != printed[GROUP * head + 1] for head in range(HEADS))  # they keep others


@pytest.mark.parametrize(
    ("settings", "prompt", "points"),
    [
        (dict(gap=3), 40, [43]),
        (dict(gap=0), 40, [40]),
        (dict(gap=3, every=5), 40, [43, 48, 53, 58]),
        (dict(gap=3, every=5), 13, [21, 26, 31, 36]),  # 16 fit
        (dict(gap=3), 13, []),
        (dict(gap=3, every=5), 14, [17, 22, 27, 32]),
    ],
)
def test_when_a_sequence_is_compressed_depends_on_its_tokens_alone(settings, prompt, points):
    how, shift, found = Compression(budget=16, window=6, **settings), 0, []
    for num_tokens in range(prompt, 60):
        point = how.point(prompt, shift, 16)
        until = int(how.until_point(*(jnp.int32(x) for x in (prompt, num_tokens, shift)), region=16))
        assert until == point - num_tokens if point is not None else until > 1e6
        if point == num_tokens:
            found.append(num_tokens)
            shift = num_tokens - 16
        assert how.shift(prompt, num_tokens, 16) == shift
    assert found[: len(points)] == points and bool(found) == bool(points)
    assert "every" in settings or found == points


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("budget", lambda: Compression(budget=32)),
        ("budget", lambda: Compression(budget=42).layout(4, (None,))),
        ("budget", lambda: Compression(budget=64).layout(4, (None, 65))),
        ("window", lambda: Compression(budget=64, window=0)),
        ("gap", lambda: Compression(budget=64, gap=-1)),
        ("every", lambda: Compression(budget=64, every=-1)),
        ("pooling", lambda: Compression(budget=64, pooling=4)),
        ("floor", lambda: AdaKV(floor=1.5)),
        ("most", lambda: AdaKV(most=0)),
        ("steepness", lambda: PyramidKV(steepness=0.5)),
        ("sinks", lambda: Streaming(sinks=-1)),
        ("name", lambda: named("h2o", 64)),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_made(name, make):
    with pytest.raises(ValueError, match=rf"^{name}: got .*, wanted ") as error:
        make()
    assert "\n" not in str(error.value)


def test_names_are_policies_and_baselines_rank_by_the_prompt_alone():
    assert named("latent", 64) == Compression(budget=64, gap=16, policy=Latent())
    assert named("snapkv", 64) == Compression(budget=64, gap=0, policy=Latent())
    assert {name: named(name, 64).fresh_tokens for name in POLICIES} == {
        "latent": 16,
        "snapkv": 32,
        "adakv": 32,
        "pyramidkv": 32,
        "streaming": 0,
        "random": 0,
    }


def test_one_program_serves_every_sequence():
    how = HOW("adakv")
    run = jax.jit(lambda given: compression.kept(given, how, how.layout(PAGE, WINDOWS), PAGE))
    assert (
        np.asarray(run(entries(1))).tolist()
        == np.asarray(compression.kept(entries(1), how, how.layout(PAGE, WINDOWS), PAGE)).tolist()
    )
