"""On a GPU tokens are multiplied by 64 at a time, and a layer's notes travel as words: neither changes anything."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import CONFIG
from small_model import MODEL, configuration, prompt, run, start, texts, weights

from et_jax.control.draft import FixedLength
from et_jax.decode import extend
from et_jax.decode.attention.reads import AllRead, ByHead, LayerReads
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting, lookup
from et_jax.decode.packed import Packed, packed, unpacked
from et_jax.models.stacks import Turns

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_texts_are_those_of_as_many_rows_as_there_are(monkeypatch):
    """Of a mixture of experts, whose router sees none of the rows beside; drafted and not."""
    experts = dataclasses.replace(CONFIG, layers=(True,))
    model = dataclasses.replace(MODEL, num_layers=1, windows=(None,), experts=experts)
    drafting = Drafting(most=4, length=FixedLength(), drafter=lookup)
    params, config, rows = weights(model=model), configuration(model=model, draft=drafting), []
    forward = extend.forward

    def watched(weights, model, tokens, *more):
        if tokens.shape[1] == 1:
            rows.append(len(tokens))
        return forward(weights, model, tokens, *more)

    monkeypatch.setattr(extend, "forward", watched)
    found = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(extend, "platform", lambda name=platform: name)
        d = decoder(config)
        state = start(d, params, d.empty(), 0, prompt(0, 9) * 2, temperature=0.0)
        state = start(d, params, state, 2, prompt(1, 14), seed=1)
        found.append(run(d, params, state, 12)[1])
        assert set(rows) == {64} if platform == "gpu" else max(rows) == 15
        rows.clear()
    expected, told = found
    assert texts(told) == texts(expected) and sum(len(text) for text in texts(told).values()) > 10
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, told, expected)  # what experts each token went to, too


ROWS, HEADS, WORDS = 3, 4, 2


def notes(turn=1) -> LayerReads:
    kept = jnp.linspace(-1.0, jnp.inf, ROWS * HEADS).reshape(ROWS, HEADS).at[0, 0].set(jnp.nan) * turn
    mask = jnp.arange(ROWS * HEADS * WORDS, dtype=jnp.uint32).reshape(ROWS, HEADS, WORDS) << 28
    return LayerReads(block_mask=mask, block_mass=None, by_head=ByHead(kept=kept, entropy=-kept))


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_notes_come_back_as_they_were():
    assert isinstance(packed(notes()), Packed)
    assert_same(unpacked(packed(notes())), notes())
    _, many = jax.lax.scan(lambda turn, _: (turn + 1, packed(notes(turn))), jnp.float32(1), length=4)
    told = unpacked((Turns(of_period=(many,), depth=4), None))
    assert_same(told, (Turns(of_period=(jax.vmap(notes)(jnp.arange(1.0, 5.0)),), depth=4), None))


def test_masks_and_numbers_of_the_host_come_back_too():
    tree = {"mask": jnp.arange(6).reshape(3, 2) % 2 == 0, "number": -jnp.arange(3), "share": jnp.arange(3) / 7}
    assert isinstance(packed(tree), Packed)
    assert_same(unpacked(packed(tree)), tree)
    assert_same(unpacked(jax.device_get(packed(tree))), jax.device_get(tree))


def test_what_are_no_words_of_one_number_of_rows_stays_as_it_is():
    short = jnp.zeros(3, jnp.bfloat16)
    for one in (AllRead(), {"alone": jnp.zeros(3)}, (jnp.zeros(3), jnp.zeros(4)), (jnp.zeros(3), short)):
        assert packed(one) is one
