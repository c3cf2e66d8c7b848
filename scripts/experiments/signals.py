"""Which signal of entropy or error should say how much attention a token may leave unread?

One tolerance for all is the baseline. Other arms multiply it, token by token, by a factor whose logarithm follows a
signal: the entropy of the next token as the step before saw it, as this very step does (which no decoder knows yet), or
the attention entropy of the token, with either sign. "shuffled" gives each token the factor of another one. Per head
stands the attention entropy as preset `certified` uses it; the last arms read by expected error, alone and with that.
Every arm's tolerance is searched until it reads the wanted share of blocks.

`--selector share` asks the same of the blocks of preset `share`. The tolerance is then the odds of an unread block. Its
arms per head take the attention entropy by boxes and mean keys; "drawn" takes normal numbers in its place.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from et_jax.control import select
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.selector import AnySelector
from et_jax.control.view import BlockView, attention_entropy, box_log_mass
from et_jax.types import replace
from scripts.measuring import paired
from scripts.measuring.experiment import Group, grouped, setting
from scripts.measuring.selectors import guarded
from scripts.measuring.teacher_forced import FIGURES, Forced, Scores

TOP = select.TopBlocks()
DEVIATION = 0.25  # of numbers drawn in the place of attention entropies, which lie between 0 and 1


def top_blocks(view: BlockView) -> Bool[Array, " n"]:
    """Return the blocks that preset `share` reads, of which the tolerance is the odds of an unread block."""
    unread = view.head_tolerance / (1.0 + view.head_tolerance)
    return TOP.opened(replace(view, head_tolerance=unread))


def of_heads(slope: float, *, drawn: bool = False) -> AnySelector:
    """Return `top_blocks` with odds of each query head that follow its attention entropy, or numbers drawn for it."""

    def chosen(view: BlockView) -> Bool[Array, " n"]:
        entropy = attention_entropy(box_log_mass(view), view.num_tokens > 0)
        if drawn:
            head = jax.lax.bitcast_convert_type(jnp.sum(view.key_mean), jnp.int32)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), view.length), head)
            entropy = 1.0 + DEVIATION * jax.random.normal(key, entropy.shape)
        return top_blocks(replace(view, head_tolerance=view.tolerance * jnp.exp(slope * (entropy - 1.0))))

    return chosen


CERTIFIED = select.Certified(select.coded_bounds)
PER_HEAD: dict[str, dict[str, AnySelector]] = {
    "certified": {
        "attention entropy of heads": select.PerHead(CERTIFIED, AttentionEntropy()),
        "expected error": ExpectedError(),
        "expected error, attention entropy of heads": select.PerHead(ExpectedError(), AttentionEntropy()),
    },
    "share": {
        "attention entropy of heads, more where high": of_heads(2.0),
        **{f"attention entropy of heads, less where high, slope {slope:g}": of_heads(-slope) for slope in (2, 4, 8)},
        "drawn, slope 2": of_heads(-2.0, drawn=True),
    },
}


class Settings(Forced):
    """Flags of the experiment."""

    selector: str = setting("certified", "what selects blocks", choices=tuple(PER_HEAD))
    shares: tuple[float, ...] = setting((0.5, 0.25), "of blocks", least=0.01, most=1.0, quick=(0.6,))
    spread: float = setting(0.1, "standard deviation of the logarithms of factors", least=0.0, most=5.0)
    within: float = setting(0.005, "of a share, over it, that an arm may miss it by", least=1e-4, most=0.5, quick=0.2)


def factors(signal: Float[np.ndarray, "r m"], spread: float) -> Float[np.ndarray, "r m"]:
    """Return factors whose logarithms follow a signal and deviate by `spread`; 1 where it is constant."""
    deviation = signal.std()
    return np.exp(spread * (signal - signal.mean()) / deviation) if deviation > 0 else np.ones_like(signal)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks."""
    bench = settings.bench()
    rng = np.random.default_rng(settings.seed)
    per_head, residual = PER_HEAD[settings.selector], settings.selector == "certified"
    selects = CERTIFIED if residual else top_blocks
    everything = bench.run(guarded(CERTIFIED, True), given={"tolerance": 0.0})
    now = everything.entropy
    before = np.concatenate([now[:, :1], now[:, :-1]], axis=1)
    driven = factors(before, settings.spread)
    of_tokens = {
        "constant": np.ones_like(now),
        "entropy before, more where high": driven,
        "entropy before, less where high": factors(before, -settings.spread),
        "entropy before, shuffled": rng.permuted(driven.reshape(-1)).reshape(driven.shape),
        "entropy now, more where high": factors(now, settings.spread),
        "entropy now, less where high": factors(now, -settings.spread),
        "attention entropy, more where high": factors(everything.attention_entropy, settings.spread),
    }
    near: dict[float, float] = {}  # by share, the tolerance of the baseline

    def arm(name: str, share: float) -> dict[str, Any]:
        selector, factor = per_head.get(name, selects), of_tokens.get(name, 1.0)
        start = near.get(share) if name in of_tokens else None

        def run(tolerance: float, few: bool) -> Scores:
            return bench.run(guarded(selector, residual), given={"tolerance": tolerance * factor}, few=few)

        at, found = paired.at_budget(run, "share_read", share, 1e-9, 1e6, settings.within, start)
        near.setdefault(share, at)
        return found.by_row(*FIGURES)

    yield from grouped("share", settings.shares, (*of_tokens, *per_head), arm, "constant")
