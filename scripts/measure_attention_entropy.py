"""Which signal should say how much of its attention a head may leave unread: arms at equal blocks read, side by side.

    python scripts/measure_attention_entropy.py --case bundled novels.tar.xz --case FOLDER stories.txt

Rows of held-out text at full context are read densely but for the last tokens (at most 256, at most half), which pass
through the model reading less, the true next token given each time. Every arm's tolerance is searched until it reads
the wanted share of blocks to within a thousandth; what is compared is the KL divergence from dense. Savings are over
the same blocks read at one constant tolerance, with 95% intervals from resampling rows, and the smallest saving that
would have been seen. Constants of heads and layers come from the first half of the rows, everything is measured on the
second. With `--fit` only the slope of attention entropy is chosen, on the first half, and nothing is written.

The arms: attention entropy of each head as served ("attention entropy"); its constant part ("each head's", "each
layer's"); its values shuffled over the tokens of a head, or over the heads of a token, and their mean over the heads;
the entropy of the next token, of the step before and of this very step (which no decoder knows yet), with either sign;
thresholds on a block's estimated mass and on what it would change; and an oracle that knows what each block changes.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import select
from et_jax.control.head_tolerance import AttentionEntropy
from et_jax.control.view import BlockView, held_values, likeliest_log_mass
from et_jax.errors import UsageError
from et_jax.evidence import forced, paired
from et_jax.evidence.held_out import rows
from et_jax.evidence.results import RESULTS, write
from et_jax.serve.engine import load
from et_jax.types import replace

SHARES = (0.5, 0.35, 0.25, 0.15)
SLOPES = (0.0, 0.8, 1.2, 5 / 3, 2.5, 3.5, 5.0)
FITTED = {0.0: 2.0, 1.0: 0.8}  # the slope where unread blocks are dropped, and where they count as their mean value
SPREADS = (0.1, 0.3)  # of the log of a tolerance that the next token's entropy sets, either way
MEASURED = 256  # tokens a row
CERTIFIED = select.Certified(select.coded_bounds)


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

    def half(self, first: bool) -> slice:
        return slice(0, self.count // 2) if first else slice(self.count // 2, self.count)

    def run(self, arm: forced.Arm, tolerance: float, factors: np.ndarray | None, half: slice) -> forced.Score:
        """Return the scores on some of the rows; no factors means the same tolerance for all."""
        c, line = self.config, jax.tree.map(lambda x: x[half], self.text)
        r, m = line.measured.shape
        whole = (r, c.num_layers, m, c.num_kv_heads, c.group_size)
        given = jnp.ones(whole) if factors is None else jnp.asarray(np.broadcast_to(factors, whole), jnp.float32)
        return forced.run(c, self.params, line, arm, jnp.float32(tolerance), given, page_size=self.page_size)

    def at_share(self, arm: forced.Arm, share: float, factors: np.ndarray | None, half: slice) -> forced.Score:
        """Return the scores where the arm reads this share of blocks."""

        def spend(tolerance: float) -> tuple[float, forced.Score]:
            score = self.run(arm, tolerance, factors, half)
            return float(score.read.sum() / score.held.sum()), score

        return paired.matched(spend, share, 1e-7, 1e3)[1]


def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return each block's share of the attention mass, by the 8-bit keys that certified selection goes by."""
    return jax.nn.softmax(likeliest_log_mass(view), axis=-1)


def change(view: BlockView) -> Float[Array, "g n"]:
    """Return how far a head's output would move without each block, over its length, by the mean values."""
    share, mean = mass(view), held_values(view)
    out = share @ mean
    moved = share * jnp.linalg.norm(mean - out[:, None], axis=-1) / jnp.maximum(1.0 - share, 1e-9)
    return moved / jnp.linalg.norm(out, axis=-1, keepdims=True)


def logs_of_factors(entropy: np.ndarray, rule: AttentionEntropy) -> np.ndarray:
    """Return the log of each head's factor, "r l m k g"."""
    return float(rule.slope) * (entropy - float(rule.centre))


def of_tokens(signal: np.ndarray, spread: float) -> np.ndarray:
    """Return factors of each token, "r 1 m 1 1", whose logs follow a signal and deviate by `spread`."""
    return np.exp(spread * (signal - signal.mean()) / signal.std())[:, None, :, None, None]


def arms(bench: Bench, rule: AttentionEntropy, residual: float) -> dict[str, tuple[forced.Arm, np.ndarray | None]]:
    """Return every arm by name, and the factors its heads' tolerances are given."""
    certified = forced.Arm(CERTIFIED, residual)
    driven = replace(certified, selector=select.PerHead(CERTIFIED, rule))
    dense = {first: bench.run(certified, 0.0, None, bench.half(first)) for first in (True, False)}
    known, logs = (logs_of_factors(np.asarray(dense[first].entropy), rule) for first in (True, False))
    true = np.asarray(bench.text.log_probs[bench.half(False)], np.float64)
    now = -(np.exp(true) * true).sum(-1)
    before = np.concatenate([now[:, :1], now[:, :-1]], axis=1)
    r, num_layers, m, k, g = logs.shape
    over_tokens = bench.rng.permuted(logs.transpose(1, 3, 4, 0, 2).reshape(num_layers * k * g, r * m), axis=1)
    over_tokens = over_tokens.reshape(num_layers, k, g, r, m).transpose(3, 0, 4, 1, 2)
    over_heads = bench.rng.permuted(logs.transpose(0, 2, 1, 3, 4).reshape(r * m, num_layers * k * g), axis=1)
    over_heads = over_heads.reshape(r, m, num_layers, k, g).transpose(0, 2, 1, 3, 4)

    tokens = {
        f"next token's, {when}, {sign * spread:+.2f}": (certified, of_tokens(signal, sign * spread))
        for when, signal in (("before", before), ("now", now))
        for sign in (1, -1)
        for spread in SPREADS
    }
    return {
        "constant": (certified, None),
        "attention entropy": (driven, None),
        "each head's": (certified, np.exp(known.mean((0, 2), keepdims=True))),
        "each layer's": (certified, np.exp(known.mean((0, 2, 3, 4), keepdims=True))),
        "shuffled over tokens": (certified, np.exp(over_tokens)),
        "shuffled over heads": (certified, np.exp(over_heads)),
        "mean over heads": (certified, np.exp(logs.mean((1, 3, 4), keepdims=True))),
        **tokens,
        "mass above a threshold": (replace(certified, selector=select.ActiveSet(mass)), None),
        "change above a threshold": (replace(certified, selector=select.ActiveSet(change)), None),
        "oracle": (replace(certified, oracle=True), None),
    }


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
            for name, (arm, factors) in each.items():
                line = {"share": share, "residual": bool(residual), "arm": name}
                try:
                    score = bench.at_share(arm, share, factors, bench.half(False))
                except ValueError as error:
                    lines.append(line | {"missed": str(error)})
                    print(f"{share:.2f} {'residual' if residual else 'drop':9} {name:34} {error}", flush=True)
                    continue
                loss = np.asarray(score.divergence, np.float64).sum(1)
                baseline = loss if baseline is None else baseline
                saved = paired.saving(loss, baseline)
                lines.append(line | summary(score) | {"saving": asdict(saved)})
                print(
                    f"{share:.2f} {'residual' if residual else 'drop':9} {name:34} {loss.mean() / MEASURED:.6f} "
                    f"{saved.share:+.3f} ({saved.low:+.3f} to {saved.high:+.3f}, visible {saved.visible:.3f})",
                    flush=True,
                )
    return lines


def fit(bench: Bench, shares: tuple[float, ...]) -> None:
    """Print what each slope saves on the first half of the rows."""
    for residual in (0.0, 1.0):
        for share in shares:
            losses = {}
            for slope in SLOPES:
                arm = forced.Arm(select.PerHead(CERTIFIED, AttentionEntropy(slope)), residual)
                losses[slope] = float(bench.at_share(arm, share, None, bench.half(True)).divergence.mean())
            saved = " ".join(f"{slope:.2f}: {1 - loss / losses[0.0]:+.3f}" for slope, loss in losses.items())
            print(f"{share:.2f} {'residual' if residual else 'drop':9} {saved}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, action="append", required=True, metavar=("MODEL", "TEXT"))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=48, help="rows of text at full context, two halves (default 48)")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--fit", action="store_true", help="choose the slope on the first half, and stop")
    parser.add_argument("--output", type=Path, default=RESULTS / "attention_entropy.json")
    args = parser.parse_args()
    if args.rows < 4:
        parser.error(f"--rows is {args.rows}; it must be at least 4, two for each half")
    if args.page_size < 1:
        parser.error(f"--page-size is {args.page_size}; it must be at least 1 token")
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
