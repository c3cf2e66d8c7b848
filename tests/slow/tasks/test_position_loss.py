"""The loss by position: that of the dense model where all is read, and more where the decoder is told to read less."""

import numpy as np
import pytest
from dense import dense_logits
from small_model import LENGTH, MODEL, PAGE, configuration, prompt, weights

from et_jax.control import select
from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.decode.decoder import decoder
from et_jax.errors import UsageError
from et_jax.tasks import position_loss

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def bound(selector=None, num_pages=3 * LENGTH // PAGE + 1):
    controller = Controller(selector=selector or select.Dense())
    return decoder(configuration(controller=controller, num_pages=num_pages, keep=frozenset({"logits"})))


@pytest.fixture(scope="module")
def tokens():
    return np.array([prompt(number, LENGTH) for number in range(4)])  # more rows than slots


@pytest.fixture(scope="module")
def losses(tokens):
    return position_loss.position_losses(bound(), (weights(),), tokens)


def test_every_token_costs_what_the_dense_model_gives(tokens, losses):
    assert losses.shape == (4, LENGTH - 1)
    for row, found in zip(tokens, losses, strict=True):
        logits = np.asarray(dense_logits(MODEL, weights(), row[None]), np.float64)[0]
        normaliser = np.log(np.exp(logits).sum(axis=1))
        wanted = normaliser[:-1] - logits[np.arange(LENGTH - 1), row[1:]]
        np.testing.assert_allclose(found, wanted, atol=1e-3)  # float32, logits of some tens


def test_blocks_left_unread_and_a_cache_that_shrinks_change_the_loss(tokens, losses):
    little = position_loss.position_losses(bound(select.SinksWindow(0, 1)), (weights(),), tokens)
    assert not np.allclose(losses[:, LENGTH // 2 :], little[:, LENGTH // 2 :], atol=1e-2)
    how = named("latent", 16, window=6, gap=4, every=8)  # compressed at 24 tokens, 32, ...
    shrinking = decoder(configuration(compression=how, num_pages=25, keep=frozenset({"logits"})))
    found = position_loss.position_losses(shrinking, (weights(),), tokens)
    np.testing.assert_allclose(found[:, :24], losses[:, :24], atol=1e-3)
    assert (np.abs(found - losses)[:, 24:].max(axis=1) > 0.05).all()


def test_a_decoder_that_cannot_measure_is_refused(tokens):
    for unfit, words in ((bound(num_pages=20), "without pages for all rows"), (decoder(configuration()), "logits")):
        with pytest.raises(ValueError, match=words):
            position_loss.position_losses(unfit, (weights(),), tokens[:3])


def test_rows_are_spread_over_the_text_behind_the_first_token():
    found = position_loss.rows(list(range(100, 200)), 7, 11, 4)
    assert found.shape == (4, 11) and (found[:, 0] == 7).all() and found[-1, -1] == 199
    assert found[0, 1:].tolist() == list(range(100, 110)) and (np.diff(found[:, 1:], axis=1) == 1).all()
    assert position_loss.rows(list(range(100)), None, 10, 2)[0].tolist() == list(range(10))
    with pytest.raises(UsageError, match="longer text"):
        position_loss.rows(list(range(10)), 7, 11, 4)


def test_stretches_double_and_together_hold_every_loss():
    losses = np.arange(1.0, 64.0)[None].repeat(2, axis=0)  # the loss of position i is i
    found = position_loss.by_position(losses, num_buckets=4)
    assert list(found) == [(1, 8), (8, 16), (16, 32), (32, 64)] and found[8, 16] == np.mean(range(8, 16))
    assert sum((end - begin) * mean for (begin, end), mean in found.items()) == pytest.approx(losses[0].sum())
    assert list(position_loss.by_position(np.ones((1, 3)))) == [(1, 2), (2, 4)]
