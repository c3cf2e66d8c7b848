"""Which signal predicts wrong tokens, and tokens that lose most by unread blocks?

Rows of held-out text are read as prompts but for the last tokens, which pass one by one through the decoder's step,
under dense attention and under a certificate for one tolerance, whose signals are compared. A signal's AUC is the
probability that it is greater at a token of the one kind than at a token of the other, ties counting half: 0.5 is a
coin. "wrong" are the tokens whose likeliest successor under dense attention is not the true one. "costly" are the
quarter of a row's tokens of greatest KL from dense attention. `entropy before` is that of the step before, the newest
that a decoder knows when it selects. "shuffled" deals the entropies out among a row's tokens.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata

from et_jax.control import select
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.selectors import guarded
from scripts.measuring.teacher_forced import Forced, TeacherForced

FIGURES = {"wrong": Figure(header="AUC, wrong tokens"), "costly": Figure(header="AUC, costly tokens")}
SIGNALS = {
    "next-token entropy": lambda scores, _: scores.entropy,
    "entropy before": lambda scores, _: np.concatenate([scores.entropy[:, :1], scores.entropy[:, :-1]], axis=1),
    "attention entropy": lambda scores, _: scores.attention_entropy,
    "unread mass": lambda scores, _: 1.0 - scores.kept_mass,
    "shuffled": lambda scores, rng: rng.permuted(scores.entropy, axis=1),
}


class Settings(Forced):
    """Flags of the experiment."""

    model: str = setting("smollm2", "a model, or a folder with one", kind="model", quick="bundled-small")
    length: int = setting(2048, "tokens of a row", least=64, quick=161)
    tolerance: float = setting(0.2, "the mass that a head may leave unread", least=0.0, most=1.0)


def auc(signal: Float[np.ndarray, "r m"], kind: Bool[np.ndarray, "r m"]) -> Float[np.ndarray, " r"]:
    """Return each row's AUC of a signal for the tokens of a kind (Mann-Whitney's U a pair); NaN without both."""
    ranks, count = rankdata(signal, axis=1), kind.sum(axis=1)
    pairs = count * (kind.shape[1] - count)
    above = (ranks * kind).sum(axis=1) - count * (count + 1) / 2
    return np.divide(above, pairs, out=np.full(len(kind), np.nan), where=pairs > 0)


def wrong(bench: TeacherForced) -> Bool[np.ndarray, "r m"]:
    """Return the measured tokens whose likeliest successor under dense attention is not the true one."""
    likeliest = np.concatenate([np.asarray(part.argmax(axis=-1)).T for part in bench.dense_log_probs])
    return likeliest[: len(bench.rows)] != bench.rows[:, bench.start + 1 :]


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group, with an arm for each signal."""
    bench = settings.bench()
    certified = guarded(select.Certified(select.coded_bounds), residual=True)
    scores = bench.run(certified, given={"tolerance": settings.tolerance})
    costly = scores.divergence >= np.quantile(scores.divergence, 0.75, axis=1, keepdims=True)
    kinds = {"wrong": wrong(bench), "costly": costly}

    def arm(name: str) -> dict[str, Any]:
        signal = np.asarray(SIGNALS[name](scores, np.random.default_rng(settings.seed)))
        return {figure: auc(signal, kind) for figure, kind in kinds.items()}

    yield Group(arms={name: partial(arm, name) for name in SIGNALS})
