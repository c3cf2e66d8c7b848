"""Controllers by name: what each is made of, what its laws decide over some tokens, and what is refused."""

import numpy as np
import pytest

from et_jax.control import contribution, guards, select
from et_jax.control.budget import EntropyBudget
from et_jax.control.controller import Controller
from et_jax.control.entropy import ExactEstimator, TailCorrectedEstimator
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.presets import preset
from et_jax.control.switch import AsPrinted, Hysteresis
from et_jax.errors import UsageError

PRUNING = ("paper", "guarded", "certified", "adaptive")


@pytest.mark.parametrize("name", PRUNING)
def test_a_target_moves_the_temperature_and_all_but_the_paper_only_cool(signals, state, run, name):
    law = preset(name, target_entropy=2.0).law
    for tempered in (5.0, 0.5):
        seen = signals(tempered_entropy=np.full(40, tempered), tempered_varentropy=50.0)
        after = run(law, state(law, temperature=0.9), seen)
        expected, last = [], 0.9
        for _ in range(40):
            wanted = last * np.exp(-0.05 * (tempered - 2.0))  # by at most 0.1 a token, from 0.1 to 2
            last = np.clip(np.clip(wanted, last - 0.1, last + 0.1), 0.1, 2.0 if name == "paper" else 0.9)
            expected.append(last)
        np.testing.assert_allclose(after.temperature, expected, rtol=1e-5)
        assert {key: float(x[-1]) > 0 for key, x in guards.rates(after).items()} == {
            "temperature_saturation": tempered > 2 or name == "paper",
            "stability": True,
        }
    free = preset(name).law
    after = run(free, state(free, temperature=0.9), signals(tempered_entropy=np.full(3, 5.0)))
    assert np.all(after.temperature == np.float32(0.9)) and not guards.rates(after)


@pytest.mark.parametrize("name", PRUNING)
def test_a_threshold_prunes_only_what_the_entropy_calls_certain(signals, state, run, name):
    """From a floor of 0.1 nats to a reference of 2; it rises by a quarter of the greatest a token, falls at once."""
    law = preset(name, tolerance=0.8).law
    start = state(law)
    found = run(law, start, signals(entropy=np.array([3.0, 0.05, 0.05, 0.05, 0.05, 1.0, 2.5]))).tolerance
    rising = [0.0, 0.0, 0.2, 0.4, 0.6, 0.76, 0.4, 0.0]
    wanted = rising if name in ("paper", "guarded") else [0.8] * 8
    np.testing.assert_allclose([start.tolerance, *found], wanted, rtol=1e-5, atol=1e-7)


def test_presets_are_made_of_what_their_documentation_says():
    active = select.ActiveSet(contribution.relative_influence, look_every=64)
    proved = select.PerHead(select.Certified(select.coded_bounds), AttentionEntropy())
    inner = {"paper": active, "guarded": active, "certified": proved, "adaptive": ExpectedError()}
    for name in PRUNING:
        made, printed = preset(name, min_blocks=14, window=48, min_context=100), name == "paper"
        assert made.selector == select.Guarded(inner[name], sinks=0 if printed else 16, window=48, min_blocks=14)
        assert made.estimator == (TailCorrectedEstimator() if printed else ExactEstimator())
        assert made.min_context == 100 and made.residual == (name in ("certified", "adaptive"))
    assert (preset("ead", tau=0.5).switch, preset("ead_guarded", tau=0.5).switch) == (AsPrinted(0.5), Hysteresis(0.5))
    assert preset("certified", window=None) == preset("certified") != preset("certified", tolerance=0.1)
    for tokens, segment in ((2, 1), (512, 128), (4096, 512)):
        budget = EntropyBudget(tokens=tokens, segment=segment, dense_until=2 * tokens)
        assert preset("entropyinfer", prefill_budget=tokens) == Controller(budget=budget)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("entropic", {}, 'control is "entropic"; choose one of off, paper, guarded, certified, adaptive, ead, '),
        ("ead", {"window": 3}, 'control "ead" has no window; it has tau.'),
        (
            "paper",
            {"tau": 0.1},
            'control "paper" has no tau; it has target_entropy, tolerance, min_blocks, window, min',
        ),
        ("ead_guarded", {"tau": float("nan")}, "tau is nan"),
        ("entropyinfer", {"prefill_budget": 0}, "prefill_budget is 0; it must be from 1 to 536870912."),
        ("off", {"prefill_budget": 64}, 'control "off" has no prefill_budget; choose one of entropyinfer to set it.'),
        ("off", {"window": 3}, 'control "off" has no window; choose one of paper, guarded, certified, adaptive to set'),
        ("off", {"warmth": 3}, 'control "off" has no warmth; it has none.'),
        ("paper", {"target_entropy": 0.0}, "target_entropy is 0.0; it must be above 0 nats."),
        ("guarded", {"target_entropy": float("inf")}, "target_entropy is inf; it must be a finite number."),
        ("paper", {"tolerance": float("inf")}, "tolerance is inf; it must be a finite number."),
        ("certified", {"tolerance": 1.5}, "tolerance is 1.5; it must be a share of attention, from 0 to 1."),
        ("guarded", {"tolerance": -0.1}, "tolerance is -0.1; it must be 0 or above."),
        ("guarded", {"min_blocks": -1}, "min_blocks is -1; it must be from 0 (off) to 536870912."),
        ("guarded", {"window": -2}, "window is -2; it must be from 0 (off) to 536870912."),
        ("guarded", {"min_context": -1}, "min_context is -1; it must be from 0 (off) to 536870912."),
        ("adaptive", {"min_context": 2**30}, "min_context is 1073741824; it must be from 0 (off) to 536870912."),
    ],
)
def test_a_knob_that_does_not_fit_is_refused_in_one_sentence(name, knobs, message):
    with pytest.raises(UsageError) as refused:
        preset(name, **knobs)
    assert str(refused.value).startswith(message)
