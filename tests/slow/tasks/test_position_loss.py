"""The loss by position: that of the dense model where all is read."""

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

TOKENS = np.array([prompt(number, LENGTH) for number in range(4)])  # more rows than slots


def losses(**changes):
    sizes = {"num_pages": 3 * LENGTH // PAGE + 1, "keep": frozenset({"logits"})}
    return position_loss.position_losses(decoder(configuration(**sizes | changes)), (weights(),), TOKENS)


def test_every_token_costs_what_the_dense_model_says_and_what_is_not_read_changes_that():
    found = losses()
    assert found.shape == (4, LENGTH - 1)
    for row, each in zip(TOKENS, found, strict=True):
        logits = np.asarray(dense_logits(MODEL, weights(), row[None]), np.float64)[0]
        wanted = np.logaddexp.reduce(logits[:-1], axis=1) - logits[np.arange(LENGTH - 1), row[1:]]
        np.testing.assert_allclose(each, wanted, atol=1e-3)  # float32, logits of some tens
    little = losses(controller=Controller(selector=select.SinksWindow(0, 1)))
    assert not np.allclose(found[:, LENGTH // 2 :], little[:, LENGTH // 2 :], atol=1e-2)
    shrinking = losses(compression=named("latent", 16, window=6, gap=4, every=8))  # at 24 tokens, 32, ...
    np.testing.assert_allclose(shrinking[:, :24], found[:, :24], atol=1e-3)
    assert (np.abs(shrinking - found)[:, 24:].max(axis=1) > 0.05).all()


def test_a_pool_too_small_for_the_rows_and_a_decoder_without_logits_are_refused():
    with pytest.raises(ValueError, match="without pages for all rows"):
        losses(num_pages=20)
    with pytest.raises(ValueError, match="logits"):
        losses(keep=frozenset())


def test_rows_are_spread_over_the_text_behind_the_first_token():
    found = position_loss.rows(list(range(100, 200)), 7, 11, 4)
    np.testing.assert_array_equal(found, [[7, *range(at, at + 10)] for at in (100, 130, 160, 190)])
    assert position_loss.rows(list(range(100)), None, 10, 2)[0].tolist() == list(range(10))
    with pytest.raises(UsageError, match="longer text"):
        position_loss.rows(list(range(10)), 7, 11, 4)


def test_stretches_double_and_each_has_the_mean_of_its_losses():
    losses = np.arange(1.0, 64.0)[None].repeat(2, axis=0)  # the loss of position i is i
    found = position_loss.by_position(losses, num_buckets=4)
    assert found == {(begin, end): np.mean(range(begin, end)) for begin, end in ((1, 8), (8, 16), (16, 32), (32, 64))}
    assert list(position_loss.by_position(np.ones((1, 3)))) == [(1, 2), (2, 4)]
