"""What a compression keeps of a cache and when: against NumPy written out, and against numbers worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import kept_entries
import numpy as np
import pytest

from et_jax.control import compression
from et_jax.control.compression import Compression, named
from et_jax.control.policies import AdaKV, Entries, PyramidKV, Random
from et_jax.softmax import Softmax
from et_jax.types import replace

PAGE, BUDGET, WINDOW, HEADS, GROUP, DIM = 4, 16, 6, 3, 2, 8
PLACES, COUNT = 60, 51
HOW = partial(named, budget=BUDGET, window=WINDOW)
WINDOWS = (None,) * 4
LAST = list(range(COUNT - WINDOW, COUNT))
kept = jax.jit(compression.kept, static_argnums=(1, 2, 3))


def entries(seed: int, layer: int = 0, first: tuple[int, ...] = (0,) * HEADS) -> Entries:
    """Random keys and queries; what stands beyond the entries are no numbers, and the queries are in a ring."""
    drawn = np.random.default_rng(seed)
    keys = drawn.normal(size=(HEADS, PLACES, DIM)).astype(np.float32)
    keys[1] *= 3.0  # a head that attends to few
    keys[:, COUNT:] = np.nan
    queries = drawn.normal(size=(WINDOW, HEADS * GROUP, DIM)).astype(np.float32)
    return Entries(
        keys=jnp.asarray(keys),
        first=jnp.asarray(first, jnp.int32),
        count=jnp.int32(COUNT),
        queries=jnp.asarray(np.roll(queries, 2, axis=0)),
        at=jnp.asarray(np.roll(LAST, 2).astype(np.int32)),
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
    """The places kept; those that a head leaves out must stand first, in full blocks."""
    layout = how.layout(PAGE, WINDOWS)
    place = np.asarray(kept(given, how, layout, PAGE))
    assert place.shape == (HEADS, layout.region * PAGE)
    for row in place:
        left_out = int((row < 0).sum())
        assert left_out % PAGE == 0 and (row[:left_out] == -1).all() and (np.diff(row[left_out:]) > 0).all()
    return [row[row >= 0].tolist() for row in place]


@pytest.mark.parametrize("name", ["latent", "adakv"])
def test_a_policy_that_ranks_by_attention_keeps_what_is_written_out(name):
    """Also of a cache that was compressed before, where the first entry of each head draws every query."""
    for seed in range(4):
        found = chosen(HOW(name), entries(seed))
        assert found == written_out(name, entries(seed))
        assert all(each[-WINDOW:] == LAST for each in found)
        given = entries(seed, first=(28, 20, 36))
        queries = np.asarray(given.queries).reshape(WINDOW, HEADS, GROUP, DIM).mean((0, 2))
        given = replace(given, keys=given.keys.at[jnp.arange(HEADS), given.first].set(4.0 * queries))
        assert chosen(HOW(name), given) == written_out(name, given)


def test_a_split_hands_nothing_on_beyond_the_region():
    """One head has all of the layer's top entries: of three blocks a head it would take seven, and six are the most."""
    score = np.full((3, 40), 0.1, np.float32)
    score[0] = 1.0
    blocks = AdaKV(floor=0.0, most=2).head_blocks(jnp.asarray(score), 3, 6, 4, 4)
    assert blocks.tolist() == [6, 1, 1]


def test_a_pyramid_falls_in_equal_steps_and_each_layer_keeps_what_is_written_out():
    """Of 8 blocks 2 contain the window: 6 in the mean, from 11.7 down to 0.3 by 3.8, full blocks up to each layer."""
    assert PyramidKV().layer_blocks(8, 2, 4) == (14, 10, 6, 2)
    assert PyramidKV(steepness=1.0).layer_blocks(8, 2, 3) == (8, 8, 8)
    assert PyramidKV().layer_blocks(5, 5, 2) == (5, 5) and PyramidKV().layer_blocks(8, 2, 1) == (8,)
    how = HOW("pyramidkv")
    assert how.layout(PAGE, WINDOWS).layers == (6, 5, 3, 2)
    for layer, blocks in enumerate((6, 5, 3, 2)):
        given = entries(5, layer)
        assert chosen(how, given) == written_out("latent", given, budget=blocks * PAGE)


def test_streaming_keeps_both_ends_and_a_layer_with_a_sliding_window_the_last():
    given, latent = entries(0), HOW("latent")
    assert chosen(HOW("streaming"), given) == [[0, 1, 2, 3, *range(COUNT - BUDGET + 4, COUNT)]] * HEADS
    layout = latent.layout(PAGE, (None, 9))
    assert layout.layers == (4, None)
    place = kept(entries(0, 1), latent, layout, PAGE)
    assert place.tolist() == [list(range(COUNT - BUDGET, COUNT))] * HEADS


def test_chance_keeps_the_window_and_differs_by_head_layer_and_seed():
    how = HOW("random")
    found = chosen(how, entries(0))
    assert all(len(each) == BUDGET and each[-WINDOW:] == LAST for each in found)
    others = [chosen(how, entries(0, 1)), chosen(Compression(budget=16, window=6, policy=Random(1)), entries(0))]
    assert found == chosen(how, entries(0)) and found[0] != found[1] and found not in others
    assert others[0] == chosen(how, replace(entries(0), number=jnp.int32(1)))  # by a program of several layers


@pytest.mark.parametrize(
    ("settings", "prompt", "points"),
    [
        (dict(gap=3), 40, [43]),
        (dict(gap=0), 40, [40]),
        (dict(gap=3, every=5), 40, [43, 48, 53, 58]),
        (dict(gap=3, every=5), 13, [21, 26, 31, 36, 41, 46, 51, 56]),  # 16 fit
        (dict(gap=3), 13, []),
        (dict(gap=3, every=5), 14, [17, 22, 27, 32, 37, 42, 47, 52, 57]),
    ],
)
def test_when_a_sequence_is_compressed_depends_on_its_tokens_alone(settings, prompt, points):
    how, shift, found, until, most = Compression(budget=16, window=6, **settings), 0, [], [], prompt
    texts, shifts = range(prompt, 60), []
    for num_tokens in texts:
        shifts.append(shift)
        most = max(most, num_tokens - shift)
        assert how.most_cached(prompt, num_tokens, 16) == most
        point = how.point(prompt, shift, 16)
        until.append(2**30 if point is None else point - num_tokens)
        if point == num_tokens:
            found.append(num_tokens)
            shift = num_tokens - 16
        assert how.shift(prompt, num_tokens, 16) == shift
    assert found == points
    prompts, lengths, left_out = map(jnp.asarray, ([prompt] * len(texts), list(texts), shifts))
    left = np.asarray(how.until_point(prompts, lengths, left_out, 16))
    assert np.where(left > 10**6, 2**30, left).tolist() == until
