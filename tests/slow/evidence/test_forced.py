"""Text read less of, all its tokens at once, is what the decoder gives token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import LENGTH, MODEL, PAGE, configuration, prompt, start, weights

from et_jax.control import contribution, select
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.control.view import mass
from et_jax.decode import decoder as decoding
from et_jax.evidence import forced
from et_jax.models.calibration import Calibration
from et_jax.types import Table, replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

START, SLOT = 32, 1
HEADS = MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size
SENSITIVITY = jnp.geomspace(0.05, 2.0, MODEL.num_layers * MODEL.num_heads).reshape(HEADS)  # no two heads alike
CODED = select.Certified(select.coded_bounds)
ARMS = {
    "certified": (CODED, 0.2, False),
    "per head": (select.PerHead(CODED, AttentionEntropy()), 0.1, True),
    "influence": (select.ActiveSet(contribution.relative_influence, mass), 0.2, True),
    "expected error": (ExpectedError(), 0.01, True),
}


@pytest.fixture(scope="module")
def text():
    tokens = jnp.asarray([prompt(5, LENGTH), prompt(6, LENGTH)], jnp.int32)
    return tokens, forced.text(MODEL, weights(), tokens, START)


def decoder_of(selector, tolerance: float, residual: bool) -> decoding.Decoder:
    controller = Controller(law=chain(EmaEntropy(), Constant(tolerance)), selector=selector, residual=residual)
    measured = Calibration(sensitivity=Table(np.asarray(SENSITIVITY)))
    return decoding.decoder(configuration(controller=controller, keep=frozenset({"logits"}), calibration=measured))


def step_by_step(d: decoding.Decoder, tokens: list[int]):
    """The decoder's log-probabilities and blocks read, the next token given each time."""
    state = start(d, weights(), d.empty(), SLOT, tokens[: START + 1], temperature=0.0, limit=LENGTH)
    logits, signals = [], []
    for token in tokens[START + 1 :]:
        state, _ = d.step((weights(),), state)
        assert state.logits is not None
        logits.append(np.asarray(jax.nn.log_softmax(state.logits[SLOT])))
        signals.append(jax.tree.map(lambda x: np.asarray(x[SLOT]), state.signals))
        state = replace(state, token=state.token.at[SLOT].set(token))
    return np.stack(logits), jax.tree.map(lambda *x: np.stack(x), *signals)


def score(line: forced.ForcedText, arm: forced.Arm, tolerance: float, factor: float = 1.0) -> forced.Score:
    r, m = line.measured.shape
    factors = jnp.full((r, HEADS[0], m, *HEADS[1:]), factor, jnp.float32)
    return forced.run(MODEL, weights(), line, arm, jnp.float32(tolerance), factors, SENSITIVITY, page_size=PAGE)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_the_decoder_under_its_selector(text, name):
    selector, tolerance, residual = ARMS[name]
    tokens, line = text
    arm, d = forced.Arm(selector, float(residual)), decoder_of(selector, tolerance, residual)
    got = score(line, arm, tolerance)
    assert int(got.read.sum()) < int(got.held.sum())
    for row, given in enumerate(tokens.tolist()):
        logits, signals = step_by_step(d, given)
        np.testing.assert_array_equal(got.read[row], signals.blocks_read)
        true = np.asarray(line.log_probs[row], np.float64)
        divergence = (np.exp(true) * (true - logits)).sum(-1)
        np.testing.assert_allclose(got.divergence[row], divergence, rtol=2e-3, atol=2e-5)
        np.testing.assert_allclose(got.entropy[row].mean((0, 2, 3)), signals.attention_entropy, atol=1e-4)
        np.testing.assert_allclose(got.entropy[row].min((0, 2, 3)), signals.least_attention_entropy, atol=1e-4)


def test_all_read_is_dense_and_a_factor_is_a_tolerance(text):
    _, line = text
    arm = forced.Arm(CODED)

    def run(tolerance: float, factor: float):
        return score(line, arm, tolerance, factor)

    whole = run(0.0, 1.0)
    np.testing.assert_array_equal(whole.read, whole.held)
    np.testing.assert_allclose(whole.divergence, 0.0, atol=1e-5)
    np.testing.assert_array_equal(run(0.1, 2.0).read, run(0.2, 1.0).read)


def test_the_oracle_opens_what_moves_the_output(text):
    """A tolerance of nothing opens everything; one above every effect opens the tail alone."""
    _, line = text
    oracle = forced.Arm(CODED, oracle=True)

    def run(tolerance: float):
        return score(line, oracle, tolerance)

    tails = MODEL.num_layers * MODEL.num_kv_heads
    assert (np.asarray(run(1e9).read) == tails).all()
    np.testing.assert_array_equal(run(0.0).read, run(0.0).held)
