"""Which signal should say how much of its attention a head may leave unread: arms at equal blocks read, side by side.

    python scripts/measure_attention_entropy.py --case bundled novels.tar.xz --case FOLDER stories.txt

Rows of held-out text at full context are read densely but for the last tokens (at most 256, at most half), which pass
through the model reading less, the true next token given each time. Every arm's tolerance is searched until it reads
the wanted share of blocks to within a thousandth; what is compared is the KL divergence from dense. Savings are over
the same blocks read at one constant tolerance, with 95% intervals from resampling rows, and the smallest saving that
would have been seen. Constants and sensitivities of heads come from the first half of the rows, everything is measured
on the second. With `--fit` only the slope of attention entropy is chosen, on the first half, and nothing is written.
With `--add` the cases join those that the file holds.

The arms: attention entropy of each head as served ("attention entropy"); its constant part ("each head's", "each
layer's"); its values shuffled over the tokens of a head, or over the heads of a token, and their mean over the heads;
each layer's constant by its sensitivity alone; the entropy of the next token, of the step before and of this very step
(which no decoder knows yet), with either sign; a second reading at a tenth of the tolerance for the tenth of tokens
whose margin is least, its blocks counted; one constant for the likeliest mass, not proved; thresholds on a block's
mass, on what it would change, and on that by the head's sensitivity; the least expected error, as `adaptive` reads,
with sensitivities and without, and with attention entropy on top; and an oracle that knows each block's effect.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from et_jax.control import contribution, select
from et_jax.control.expected_error import ExpectedError
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.selector import MaskSelector, Selector
from et_jax.control.view import BlockView, coded_mass, held_values, likeliest_log_mass, needing
from et_jax.errors import UsageError
from et_jax.evidence import forced
from et_jax.serve.engine import load
from et_jax.tasks.calibration import head_sensitivity
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring.results import with_others, write
from scripts.measuring.text import rows

SHARES = (0.5, 0.35, 0.25, 0.15)
SLOPES = (0.0, 0.8, 1.2, 5 / 3, 2.5, 3.5, 5.0)
FITTED = {0.0: 2.0, 1.0: 0.8}  # the slope where unread blocks are dropped, and where they count as their mean value
SPREAD = 0.1  # of the log of a tolerance that the next token's entropy sets, either way
FEW = 2  # rows on which a tolerance is searched before all are asked
REDONE = 0.1  # of the tokens are read again, at this part of the tolerance
MEASURED = 256  # tokens a row
CERTIFIED = select.Certified(select.coded_bounds)
UNCAPPED = 1e6  # tolerances from nothing to this are searched


class Bench:
    """One model's rows of text, and what arms give on them."""

    def __init__(self, name: str, text: Path, args: argparse.Namespace) -> None:
        model = load(name, dtype="float32", max_num_seqs=2)
        self.config, self.params, self.page_size = model.config, model.params, args.page_size
        length = model.config.max_positions
        self.start = max(length - MEASURED, length // 2)
        tokens = jnp.asarray(rows(model, text, args.rows, length))
        self.text = forced.text(model.config, model.params, tokens, self.start)
        self.rng = np.random.default_rng(0)
        self.count = tokens.shape[0]
        known = np.asarray(tokens[self.half(True), :-1])
        self.sensitivity = jnp.asarray(head_sensitivity(model.config, model.params, known, self.start), jnp.float32)

    def half(self, first: bool) -> slice:
        return slice(0, self.count // 2) if first else slice(self.count // 2, self.count)

    def run(self, arm: "Served", tolerance: float, half: slice) -> forced.Score:
        """Return the scores on some of the rows."""
        c, line = self.config, jax.tree.map(lambda x: x[half], self.text)
        r, m = line.measured.shape
        whole = (r, c.num_layers, m, c.num_kv_heads, c.group_size)
        factors = arm.factors if np.ndim(arm.factors) == 0 else arm.factors[: half.stop - half.start]
        factors = jnp.asarray(np.broadcast_to(factors, whole), jnp.float32)
        sensitivity = jnp.ones_like(self.sensitivity) if arm.insensitive else self.sensitivity
        at = jnp.float32(tolerance)
        return forced.run(c, self.params, line, arm.arm, at, factors, sensitivity, page_size=self.page_size)

    def at_share(self, arm: "Served", share: float, half: slice) -> tuple[float, forced.Score]:
        """Return the tolerance at which the arm reads this share of blocks, and the scores there."""

        def spend(tolerance: float, rows: slice) -> tuple[float, forced.Score]:
            score = self.run(arm, tolerance, rows)
            if arm.redone:
                score = redone(score, self.run(arm, REDONE * tolerance, rows))
            return float(score.read.sum() / score.held.sum()), score

        few = slice(half.start, half.start + FEW)
        about, _ = paired.matched(lambda t: spend(t, few), share, 1e-9, UNCAPPED, within=0.02)
        return paired.matched(lambda t: spend(t, half), share, 1e-9, UNCAPPED, start=about)


@dataclasses.dataclass(frozen=True)
class Served:
    """An arm, factors of its heads' tolerances, "r l m k g", and whether it takes all heads for alike.

    With `redone` the tokens of least margin are read a second time.
    """

    arm: forced.Arm
    factors: Any = 1.0
    insensitive: bool = False
    redone: bool = False


def redone(once: forced.Score, again: forced.Score) -> forced.Score:
    """Return the scores where the tokens of least margin are read again, the blocks of both readings counted.

    What a token leaves in the cache for those after it stays that of its own reading.
    """
    small = once.margin <= jnp.quantile(once.margin, REDONE)

    def chosen(one: Array, other: Array) -> Array:
        return jnp.where(small, other, one)

    return replace(
        once,
        divergence=chosen(once.divergence, again.divergence),
        loss=chosen(once.loss, again.loss),
        agrees=chosen(once.agrees, again.agrees),
        read=once.read + jnp.where(small, again.read, 0),
    )


@needing("codes")
def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return each block's share of the attention mass, by the 8-bit keys that certified selection goes by."""
    return jax.nn.softmax(likeliest_log_mass(view), axis=-1)


@needing("codes")
def change(view: BlockView) -> Float[Array, "g n"]:
    """Return how far a head's output would move without each block, over its length, by the mean values."""
    return moved(view) / jnp.linalg.norm(mass(view) @ held_values(view), axis=-1, keepdims=True)


@needing("codes")
def unproved(view: BlockView) -> Bool[Array, " n"]:
    """Return the fewest blocks that leave at most a head's tolerance of the likeliest mass unread."""
    return select.fewest(view, mass(view))


@needing("codes", "sensitivity")
def sensitive_change(view: BlockView) -> Float[Array, "g n"]:
    """Return what leaving out each block would cost by its change alone: the root of the nats, by the mean values."""
    assert view.sensitivity is not None
    return moved(view) * jnp.sqrt(view.sensitivity)[:, None]


def moved(view: BlockView) -> Float[Array, "g n"]:
    """Return how far a head's output would move without each block, by the mean values."""
    share, mean = mass(view), held_values(view)
    apart = jnp.linalg.norm(mean - (share @ mean)[:, None], axis=-1)
    return share * apart / jnp.maximum(1.0 - share, 1e-9)


def logs_of_factors(entropy: np.ndarray, rule: AttentionEntropy) -> np.ndarray:
    """Return the log of each head's factor, "r l m k g"."""
    return float(rule.slope) * (entropy - 1.0)


def of_tokens(signal: np.ndarray, spread: float) -> np.ndarray:
    """Return factors of each token, "r 1 m 1 1", whose logs follow a signal and deviate by `spread`."""
    return np.exp(spread * (signal - signal.mean()) / signal.std())[:, None, :, None, None]


def arms(bench: Bench, rule: AttentionEntropy, residual: float) -> dict[str, Served]:
    """Return every arm by name."""

    def opening(selector: Selector, **more: Any) -> Served:
        return Served(forced.Arm(selector, residual), **more)

    def factored(factors: np.ndarray) -> Served:
        return opening(CERTIFIED, factors=factors)

    constant = opening(CERTIFIED)
    dense = {first: bench.run(constant, 0.0, bench.half(first)) for first in (True, False)}
    known, logs = (logs_of_factors(np.asarray(dense[first].entropy), rule) for first in (True, False))
    true = np.asarray(bench.text.log_probs[bench.half(False)], np.float64)
    now = -(np.exp(true) * true).sum(-1)
    before = np.concatenate([now[:, :1], now[:, :-1]], axis=1)
    r, num_layers, m, k, g = logs.shape
    over_tokens = bench.rng.permuted(logs.transpose(1, 3, 4, 0, 2).reshape(num_layers * k * g, r * m), axis=1)
    over_tokens = over_tokens.reshape(num_layers, k, g, r, m).transpose(3, 0, 4, 1, 2)
    over_heads = bench.rng.permuted(logs.transpose(0, 2, 1, 3, 4).reshape(r * m, num_layers * k * g), axis=1)
    over_heads = over_heads.reshape(r, m, num_layers, k, g).transpose(0, 2, 1, 3, 4)
    of_layers = np.asarray(bench.sensitivity).mean((1, 2)) ** -0.5

    tokens = {
        f"next token's, {when}, {sign}": factored(of_tokens(signal, float(f"{sign}{SPREAD}")))
        for when, signal in (("before", before), ("now", now))
        for sign in ("+", "-")
    }
    found = {
        "constant": constant,
        "attention entropy": opening(select.PerHead(CERTIFIED, rule)),
        "each head's": factored(np.exp(known.mean((0, 2), keepdims=True))),
        "each layer's": factored(np.exp(known.mean((0, 2, 3, 4), keepdims=True))),
        "each layer's, by sensitivity": factored((of_layers / of_layers.max())[None, :, None, None, None]),
        "shuffled over tokens": factored(np.exp(over_tokens)),
        "shuffled over heads": factored(np.exp(over_heads)),
        "mean over heads": factored(np.exp(logs.mean((1, 3, 4), keepdims=True))),
        **tokens,
        "constant, read again": opening(CERTIFIED, redone=True),
        "constant, not proved": opening(MaskSelector(unproved)),
        "mass above a threshold": opening(select.ActiveSet(contribution.mass, coded_mass)),
        "change above a threshold": opening(select.ActiveSet(lambda view, _: change(view), coded_mass)),
        "change by sensitivity": opening(
            select.ActiveSet(needing("sensitivity")(lambda view, _: sensitive_change(view)), coded_mass)
        ),
    }
    if residual:
        least = ExpectedError()
        found |= {
            "expected error": opening(least),
            "expected error, heads alike": opening(least, insensitive=True),
            "expected error, attention entropy": opening(select.PerHead(least, rule)),
            "expected error, read again": opening(least, redone=True),
        }
    return found | {"oracle": Served(forced.Arm(CERTIFIED, residual, oracle=True))}


def summary(score: forced.Score) -> dict[str, Any]:
    """Return the means over tokens."""
    return {
        "share_read": float(score.read.sum() / score.held.sum()),
        "divergence": float(score.divergence.mean()),
        "agreement": float(score.agrees.mean()),
        "loss": float(score.loss.mean()),
    }


def compare(bench: Bench, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return a line for each share, with and without the residual, and arm."""
    lines = []
    for residual, slope in FITTED.items():
        each = arms(bench, AttentionEntropy(slope), residual)
        for share in shares:
            baseline = None
            for name, arm in each.items():
                line = {"share": share, "residual": bool(residual), "arm": name}
                try:
                    tolerance, score = bench.at_share(arm, share, bench.half(False))
                except ValueError as error:
                    lines.append(line | {"missed": str(error)})
                    print(f"{share:.2f} {'residual' if residual else 'drop':9} {name:34} {error}", flush=True)
                    continue
                loss = np.asarray(score.divergence, np.float64).sum(1)
                baseline = loss if baseline is None else baseline
                saved = paired.saving(loss, baseline)
                lines.append(line | {"tolerance": tolerance} | summary(score) | {"saving": dataclasses.asdict(saved)})
                print(
                    f"{share:.2f} {'residual' if residual else 'drop':9} {name:34} {loss.mean() / MEASURED:.6f} "
                    f"{saved.share:+.3f} ({saved.low:+.3f} to {saved.high:+.3f}, visible {saved.visible:.3f}) "
                    f"at {tolerance:.3g}",
                    flush=True,
                )
    return lines


def fit(bench: Bench, shares: tuple[float, ...]) -> None:
    """Print what each slope saves on the first half of the rows."""
    for residual in (0.0, 1.0):
        for share in shares:
            losses = {}
            for slope in SLOPES:
                arm = Served(forced.Arm(select.PerHead(CERTIFIED, AttentionEntropy(slope)), residual))
                losses[slope] = float(bench.at_share(arm, share, bench.half(True))[1].divergence.mean())
            saved = " ".join(f"{slope:.2f}: {1 - loss / losses[0.0]:+.3f}" for slope, loss in losses.items())
            print(f"{share:.2f} {'residual' if residual else 'drop':9} {saved}", flush=True)


def main() -> None:
    parser = arguments.parser(__doc__, "case", "add", results="attention_entropy.json")
    parser.add_argument("--page-size", type=arguments.count(), default=16)
    parser.add_argument(
        "--rows", type=arguments.count(4), default=48, help="rows of text at full context, two halves (default 48)"
    )
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--fit", action="store_true", help="choose the slope on the first half, and stop")
    args = parser.parse_args()
    if wrong := [share for share in args.shares if not 0 < share < 1]:
        parser.error(f"--shares has {wrong[0]}; a share of blocks lies between 0 and 1")
    cases = []
    for name, text in args.case:
        try:
            bench = Bench(name, Path(text), args)
        except UsageError as error:
            sys.exit(f"measure_attention_entropy: {error}")
        print(f"{Path(name).name} on {Path(text).name}", flush=True)
        if args.fit:
            fit(bench, args.shares)
            continue
        lines = compare(bench, args.shares)
        case = {"model": Path(name).name, "text": Path(text).name, "context": bench.config.max_positions}
        cases.append(case | {"rows": bench.count // 2, "first": bench.start, "arms": lines})
    if cases and args.add:
        cases = with_others(args.output, cases)
    if cases:
        settings = {
            "page_size": args.page_size,
            "slopes": list(FITTED.values()),
            "shares": args.shares,
            "dtype": "float32",
        }
        write(args.output, "scripts/measure_attention_entropy.py", settings, cases=cases)


if __name__ == "__main__":
    main()
