"""Compressions compared on text: what is predicted after one is what the decoder predicts, row by row."""

import jax
import jax.numpy as jnp
import kept_entries
import numpy as np
import pytest
from small_model import LENGTH, MODEL, NARROW, PAGE, configuration, prompt, start, weights

from et_jax.control.compression import Compression, kept, named
from et_jax.control.policies import Latent
from et_jax.decode import decoder as decoding
from et_jax.evidence.compression_arms import HeavyHitters, Oracle, Texts, _entries, continued, texts
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

BUDGET, WINDOW, AT, COUNT = 16, 6, 40, 20
TOKENS = np.asarray([prompt(3, LENGTH), prompt(4, LENGTH)], np.int32)


@pytest.fixture(scope="module")
def dense() -> Texts:
    return texts(MODEL, weights(), jnp.asarray(TOKENS))


def after(text: Texts, how: Compression, at=(AT, AT), end=(LENGTH, LENGTH)):
    given = (jnp.asarray(each, jnp.int32) for each in (at, end))
    return continued(MODEL, weights(), text, *given, how, count=COUNT, page_size=PAGE)


def read_on(how: Compression, tokens: list[int]) -> np.ndarray:
    """The decoder's log-probabilities after each token from AT on, its prompt AT tokens, then compressed."""
    d = decoding.decoder(configuration(compression=how, keep=frozenset({"logits"})))
    state = start(d, weights(), d.empty(), 1, tokens[:AT], limit=LENGTH)
    state, _ = d.step((weights(),), state)  # the last token of the prompt
    state, granted = d.compress(state, 1)
    assert granted
    found = []
    for token in tokens[AT : AT + COUNT]:
        state, _ = d.step((weights(),), replace(state, token=state.token.at[1].set(token)))
        assert state.logits is not None
        found.append(jax.nn.log_softmax(state.logits[1]))
    return np.stack(found)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "pyramidkv", "streaming"])
def test_what_follows_a_compression_is_what_the_decoder_predicts(dense, name):
    how = named(name, BUDGET, window=WINDOW)
    got = after(dense, how)
    for row, tokens in zip(got.log_probs, TOKENS, strict=True):
        np.testing.assert_allclose(row, read_on(how, tokens.tolist()), rtol=2e-3, atol=2e-3)
    held = np.asarray(got.entries)
    mean = [held[:, layer].mean() for layer in range(MODEL.num_layers)]
    assert np.mean(mean) == BUDGET and (np.ptp(held) > 0 if name in ("adakv", "pyramidkv") else (held == BUDGET).all())
    whole = np.asarray(dense.log_probs[:, AT : AT + COUNT])
    assert np.abs(np.asarray(got.log_probs) - whole).max() > 0.1


def test_where_all_is_kept_nothing_changes(dense):
    got = after(dense, Compression(budget=AT, gap=0, window=WINDOW))
    np.testing.assert_allclose(got.log_probs, dense.log_probs[:, AT : AT + COUNT], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [Latent(), HeavyHitters(recent=8), Oracle()])
def test_what_stands_past_the_end_of_a_row_says_nothing(dense, policy):
    how, end = Compression(budget=BUDGET, gap=0, window=WINDOW, policy=policy), AT + 7
    one = after(dense, how, end=(end, end))
    other = texts(MODEL, weights(), jnp.asarray(np.where(np.arange(LENGTH) < end, TOKENS, 5)))
    two = after(other, how, end=(end, end))
    np.testing.assert_allclose(one.log_probs[:, :7], two.log_probs[:, :7], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [20, 32, 40])
def test_a_text_that_fits_is_left_alone(dense, budget):
    """Its region holds 40 tokens, all there are, or 64, all of the row, or 80."""
    got = after(dense, named("adakv", budget, window=WINDOW))
    np.testing.assert_allclose(got.log_probs, dense.log_probs[:, AT : AT + COUNT], rtol=1e-4, atol=1e-4)
    assert (np.asarray(got.entries) == AT).all()


def test_each_row_has_a_point_of_its_own(dense):
    how = named("snapkv", BUDGET, window=WINDOW)
    both = after(dense, how, at=(AT, 30))
    early = after(dense, how, at=(30, 30))
    np.testing.assert_array_equal(both.log_probs[0], after(dense, how).log_probs[0])
    np.testing.assert_array_equal(both.log_probs[1], early.log_probs[1])


def test_heavy_hitters_are_those_of_all_queries_so_far(dense):
    recent, layer = 8, 1
    how = Compression(budget=BUDGET, gap=0, window=WINDOW, policy=HeavyHitters(recent=recent))
    row = jax.tree.map(lambda x: x[0], dense)
    given = _entries(MODEL, how, row, jnp.int32(AT), layer, row.queries[layer][AT:], jnp.ones(LENGTH - AT, bool))
    places = np.asarray(kept(given, how, how.layout(PAGE, MODEL.windows), PAGE))
    keys = np.asarray(row.keys[layer][:AT])
    queries = np.asarray(row.queries[layer][:AT]).reshape(AT, MODEL.num_kv_heads, MODEL.group_size, -1)
    for head in range(MODEL.num_kv_heads):
        mass = kept_entries.masses(keys[:, head], queries[:, head])
        expected = kept_entries.best(mass[: AT - recent], BUDGET, recent)
        assert places[head].tolist() == expected


def test_the_oracle_keeps_what_is_attended_to_later(dense):
    how = Compression(budget=BUDGET, gap=0, window=WINDOW, policy=Oracle())
    row, layer, end = jax.tree.map(lambda x: x[0], dense), 0, AT + 9
    following = row.queries[layer][AT : AT + COUNT]
    there = jnp.arange(COUNT) < end - AT
    given = _entries(MODEL, how, row, jnp.int32(AT), layer, following, there)
    places = np.asarray(kept(given, how, how.layout(PAGE, MODEL.windows), PAGE))
    grouped = np.asarray(following[:9], np.float64).reshape(9, MODEL.num_kv_heads, MODEL.group_size, -1)
    for head in range(MODEL.num_kv_heads):
        scores = np.einsum("wgd,nd->wgn", grouped[:, head], np.asarray(row.keys[layer][:AT, head], np.float64))
        weights_ = np.exp(
            scores / np.sqrt(MODEL.head_dim) - scores.max(axis=-1, keepdims=True) / np.sqrt(MODEL.head_dim)
        )
        mass = (weights_ / weights_.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
        mass[0] = np.inf  # where queries that are not there look
        assert places[head].tolist() == kept_entries.best(mass[: AT - WINDOW], BUDGET, WINDOW)


def test_models_with_a_sliding_window_are_refused():
    with pytest.raises(ValueError, match="sliding window"):
        texts(NARROW, weights(), jnp.asarray(TOKENS))
