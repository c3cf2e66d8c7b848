"""Steering against its definition, token by token: what is forbidden, allowed, favoured, and not yet to end."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.decode.sampling import steering
from et_jax.decode.sampling.steering import UNLIMITED, WORD_TOKENS, Steering, steering_fields
from et_jax.types import replace

SIZE = 75  # of the vocabulary: no multiple of 32
WORDS = ((7,), (3, 4), (5, 3, 4, 9), (*range(20, 27), 6))


def steered(logits, text, stops=(2, -1), generated=0, **asked):
    """The logits of one row, after a text of which the last token stands at its end."""
    given = {"bias": {}, "allowed": None, "words": (), "min_tokens": 0} | asked
    row = Steering(**{name: jnp.asarray(x)[None] for name, x in steering_fields(SIZE, **given).items()})
    padded = jnp.asarray([[*text, *[0] * 40]], jnp.int32)
    recent = steering.recent_tokens(padded, jnp.zeros(1, jnp.int32), jnp.asarray([len(text) - 1], jnp.int32))
    ends, drawn = jnp.asarray([stops], jnp.int32), jnp.asarray([generated])
    may = steering.may_draw(row, jnp.asarray([UNLIMITED]), SIZE)
    out = steering.steer(jnp.asarray(logits)[None], row, ends, drawn, recent, may)
    return np.asarray(out[0]), bool(row.on[0])


def expected(logits, text, stops=(2, -1), generated=0, bias=(), allowed=None, words=(), min_tokens=0):
    out = np.array(logits, np.float32)
    for token, number in dict(bias).items():
        out[token] += np.float32(number)
    for token in range(SIZE):
        if allowed is not None and token not in allowed:
            out[token] = -np.inf
        if generated < min_tokens and token in stops:
            out[token] = -np.inf
        if any((*text, token)[-len(word) :] == tuple(word) for word in words):
            out[token] = -np.inf
    return out


@pytest.mark.parametrize("text", [(1,), (3,), (5, 3), (1, 5, 3, 4), tuple(range(20, 27)), (9, *range(20, 27)), (4, 3)])
@pytest.mark.parametrize(
    "asked",
    [
        {"words": WORDS},
        {"bias": {0: 2.5, 74: -1000.0, 33: 3.0}},
        {"allowed": [2, 4, 31, 32, 63, 64, 74]},
        {"allowed": [2, 4, 6, 7, 8], "words": WORDS, "bias": {4: 50.0}, "min_tokens": 3},
    ],
)
def test_logits_are_steered_by_definition(text, asked):
    logits = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    for generated in (0, 2, 3):
        got, on = steered(logits, text, generated=generated, **asked)
        np.testing.assert_array_equal(got, expected(logits, text, generated=generated, **asked))
        assert on


def test_what_asks_for_nothing_is_off_and_a_token_is_always_left():
    logits = np.zeros(SIZE, np.float32)
    got, on = steered(logits, (1,))
    assert not on and np.array_equal(got, logits)
    assert not steering.none((), SIZE).on
    left, _ = steered(logits, (3,), allowed=[4], words=[(3, 4)])  # the words give way
    assert np.flatnonzero(left > -np.inf).tolist() == [4]
    left, _ = steered(logits, (3,), allowed=[2], min_tokens=5)  # nor does the end wait where nothing else is
    assert np.flatnonzero(left > -np.inf).tolist() == [2]


def test_forced_tokens_come_in_their_order_and_then_one_that_is_next():
    fields = steering_fields(SIZE, bias={}, allowed=range(40, SIZE), words=(), min_tokens=0, constrained=True)
    assert fields["on"]
    following = np.zeros(96, bool)
    following[[3, 41, 74]] = True
    forced = np.full(steering.MOST_FORCED, -1, np.int32)
    forced[-3:] = 5, 74, 5
    row = Steering(**{name: jnp.asarray(x)[None] for name, x in fields.items()})
    row = replace(row, forced=jnp.asarray(forced)[None])
    row = replace(row, next=jnp.asarray(np.packbits(following, bitorder="little").view(np.uint32))[None])
    for allowance, expected in ((4, [5]), (3, [74]), (2, [5]), (1, [41, 74]), (UNLIMITED, [41, 74])):
        assert np.flatnonzero(steering.may_draw(row, jnp.asarray([allowance]), SIZE)[0]).tolist() == expected


@pytest.mark.parametrize(
    "asked", [{"bias": {i: 0.0 for i in range(301)}}, {"words": [(1, 2)] * 65}, {"words": [range(WORD_TOKENS + 1)]}]
)
def test_more_than_there_is_room_for_is_refused(asked):
    with pytest.raises(ValueError, match="wanted at most"):
        steered(np.zeros(SIZE), (1,), **{name: list(x) if name == "words" else x for name, x in asked.items()})
