"""What a model would draft for itself: by all blocks what it says, by few what attention to those gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.decode.draft import Pruned
from et_jax.evidence import own_drafts
from et_jax.evidence.own_drafts import PAGE, READERS, drafted, read_few, read_whole
from et_jax.models.model import forward
from et_jax.serve.engine import load

LENGTH, FIRST = 100, 70


@pytest.fixture(scope="module")
def model():
    return load("bundled-small", dtype="float32", max_num_seqs=1)


@pytest.fixture(scope="module")
def row(model):
    prompt = model.tokenizer.encode("It was in the spring of that year that the old house was let. " * 8)[:FIRST]
    [said] = model.generate([prompt], max_tokens=LENGTH - FIRST, temperature=0.7, seed=0, ignore_eos=True)
    return np.array([*prompt, *said.token_ids], np.int32)


def test_a_reader_of_everything_drafts_what_the_model_says(model, row):
    whole, layers = read_whole(model.params, model.config, jnp.asarray(row))
    everything = Pruned(mass=1.0, share=1.0)
    for reader in READERS:
        few = read_few(model.params, model.config, everything, reader, jnp.asarray(row), layers)
        np.testing.assert_allclose(few, whole, atol=2e-3)
    found = drafted(model, row[None], FIRST, 0.7, [(reader, 1.0) for reader in READERS])
    assert all(each.hits.mean() > 0.95 and each.reproduced > 0.95 for each in found.values())


@pytest.mark.parametrize("reader", READERS)
def test_few_blocks_are_read_as_attention_to_them_by_hand(model, row, reader):
    """The last token, head by head in float64: listed blocks, the first, the last, its own key; then the means."""
    tokens = jnp.asarray(row)
    _, layers = read_whole(model.params, model.config, tokens)
    how, at = Pruned(mass=0.8, share=0.3), LENGTH - 1
    few = read_few(model.params, model.config, how, reader, tokens, layers)
    listed, means = READERS[reader]
    left_out = 0

    def attend(layer, q, k, v, memory, softmax):
        nonlocal left_out
        known = jax.tree.map(lambda x: np.asarray(x, np.float64), layers[layer])
        held = jnp.arange(LENGTH, dtype=jnp.int32) // PAGE + 1
        opened = np.array(listed(how, layers[layer].share, held, k.shape[2]))[at]
        opened[:, [0, at // PAGE]] = True
        queries, out = np.asarray(q[0, 0], np.float64), np.zeros(q.shape[2:])
        for head, query in enumerate(queries):
            own = head // (q.shape[2] // k.shape[2])
            places = [place for place in range(at) if opened[own, place // PAGE]]
            keys = np.concatenate([known.k[places, own], np.asarray(k[0, :, own], np.float64)])
            values = np.concatenate([known.v[places, own], np.asarray(v[0, :, own], np.float64)])
            weight = np.exp(keys @ query * softmax.scale)
            out[head] = weight @ values / weight.sum()
            rest = [block for block in range(at // PAGE) if not opened[own, block]] if means else []
            left_out += len(rest)
            each = [known.v[block * PAGE : (block + 1) * PAGE, own].mean(axis=0) for block in rest]
            shares = known.share[at - 1, head, rest]
            if rest:
                out[head] = (1 - shares.sum()) * out[head] + shares @ np.array(each)
        return jnp.asarray(out, q.dtype)[None, None], memory

    token, position = tokens[at][None, None], jnp.full((1, 1), at, jnp.int32)
    expected = forward(model.params, model.config, token, position, attend, None)[0][0, 0]
    np.testing.assert_allclose(few[at], expected, atol=2e-3)
    assert (left_out > 0) == means


def test_the_latest_blocks_are_listed_as_many_as_may_be():
    share = jnp.full((2, 1, 3), 1 / 3)
    listed = own_drafts.latest(Pruned(share=0.4), share, jnp.asarray([3, 2], jnp.int32), 1)
    assert listed[:, 0].tolist() == [[False, True, True], [False, True, False]]
