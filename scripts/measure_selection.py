"""What pruning costs in quality: selectors at equal shares of blocks read, and whether entropy should set how much.

    python scripts/measure_selection.py --case bundled novels.tar.xz --case FOLDER stories.txt

Rows of held-out text at full context are prefilled but for the last tokens (at most 256, at most half), which pass one
by one through the decoder's own step. Each selector's one setting is bisected until it reads the wanted share of
blocks; the same tokens then give the KL divergence from dense decoding, how often the likeliest token is the same, and
the loss. The dense run keeps a cache of its own, so what pruning does to later keys and values counts. Bytes moved are
those of the blocks read and of what was looked at to choose, in a bfloat16 cache that keeps what the selector needs.

The second table spends one amount of reading, and so of bytes, in several ways: at a tolerance that entropy sets, at a
constant one bisected to the same reading, and at the first one's tolerances shuffled over the tokens (mean of several
seeds). Only if the first beats both has entropy chosen well. The tolerance falls from the greatest to the least,
`spread` times above and below the middle, between the 20th and the 80th percentile of the text's own entropies;
"reversed", where a law allows it, spends the most where entropy is highest, against the paper's idea.

The first and the newest block are always read. A tar archive gives the works held out from the bundled model's
training, any other file its stories.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from et_jax.control import contribution, select, tolerance
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.control.selector import AnySelector
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.view import BlockView, coded_mass, greater_mass, last_mass, mass
from et_jax.decode import slots
from et_jax.decode.config import DecoderConfig
from et_jax.decode.plant import costs
from et_jax.decode.prefill import prefill
from et_jax.decode.request import request
from et_jax.decode.state import DecodeState, empty, fresh_control, slot_laws
from et_jax.decode.step import step
from et_jax.evidence import tables
from et_jax.serve import chunks
from et_jax.serve.engine import Model, load
from et_jax.types import pytree, replace
from scripts.measuring import arguments
from scripts.measuring.results import with_others, write
from scripts.measuring.text import rows

SHARES = (0.75, 0.5, 0.25)
SEEDS = 3  # of the shuffle
MEASURED = 256  # tokens a row
SPREADS = (2.0, 8.0)  # the greatest tolerance over the middle one, and the middle over the least
BISECTIONS = 10


def _quest_share(view: BlockView) -> Bool[Array, " n"]:
    num_held = jnp.sum(view.num_tokens > 0, dtype=jnp.float32)
    return select.Quest(jnp.round(view.tolerance * num_held))(view)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A selector with one setting, which `tolerance` stands for: from `most` reading to `least`.

    Settings that are shares of something are bisected by their logarithm. With `residual`, what is not read
    counts as its mean value.
    """

    selector: AnySelector
    most: float
    least: float
    by_log: bool = True
    residual: bool = False


def _active(named: contribution.Contribution, alpha: select.Alpha, look_every: int | None = None) -> Case:
    return Case(selector=select.ActiveSet(named, alpha, look_every), most=1e-7, least=1e3)


SELECTORS = {
    "sinks and window": Case(
        selector=lambda view: select.SinksWindow(16, view.tolerance * view.length)(view),
        most=1.0,
        least=0.0,
        by_log=False,
    ),
    "quest": Case(selector=_quest_share, most=1.0, least=0.0, by_log=False),
    "quest, residual": Case(selector=_quest_share, most=1.0, least=0.0, by_log=False, residual=True),
    "top_mass": Case(selector=select.TopMass(), most=1e-6, least=1.0),
    "top_mass, residual": Case(selector=select.TopMass(), most=1e-6, least=1.0, residual=True),
    "paper, mass": _active(contribution.mass, mass),
    "paper, mass, codes": _active(contribution.mass, coded_mass),
    "paper, mass, greater": _active(contribution.mass, greater_mass, 64),
    "paper, influence": _active(contribution.influence, mass),
    "paper, relative influence": _active(contribution.relative_influence, mass),
    "paper, relative influence, codes": _active(contribution.relative_influence, coded_mass),
    "paper, relative influence, last": _active(contribution.relative_influence, last_mass, 64),
    "paper, relative influence, greater": _active(contribution.relative_influence, greater_mass, 64),
    "paper, value_gauss": _active(contribution.value_gauss, mass),
    "paper, token_nll": _active(contribution.token_nll, mass),
    "certified, int8": Case(selector=select.Certified(select.coded_bounds), most=1e-6, least=0.999),
    "certified, int8, residual": Case(
        selector=select.Certified(select.coded_bounds), most=1e-6, least=0.999, residual=True
    ),
    "certified, chord": Case(selector=select.Certified(select.chord_bounds), most=1e-6, least=0.999),
    "certified, box": Case(selector=select.Certified(select.box_bounds), most=1e-6, least=0.999),
}
CONTROLLED = ("top_mass", "certified, int8", "paper, relative influence", "paper, relative influence, greater")


@pytree
class Score:
    """What a run gave for every token, "t b": nats of KL from dense and of loss, agreement, what was read and kept."""

    divergence: jax.Array
    agrees: jax.Array
    loss: jax.Array
    share_read: jax.Array
    kept_mass: jax.Array
    entropy: jax.Array
    tolerance: jax.Array


class Bench:
    """One model on its rows of text, prefilled but for the tokens that are measured."""

    def __init__(self, model: Model, tokens: np.ndarray, page_size: int) -> None:
        self.model, self.tokens, self.page_size = model, tokens, page_size
        length = tokens.shape[1]
        self.prefilled = max(length - MEASURED, length // 2) // page_size * page_size
        self.programs: dict[Any, Callable] = {}
        config = self.config(Case(selector=select.Dense(), most=0.0, least=0.0), EmaEntropy())
        self.started = jax.jit(lambda: self._start(config))()
        forced = jnp.asarray(tokens[:, self.prefilled + 1 :].T)  # the token that follows each, "t b"
        self.forced = forced
        self.dense = jax.jit(partial(self._logits, config))(model.weights, self.started, forced)

    def share_looked_at(self, name: str) -> float:
        """Return the bytes that choosing looks at, over those of all keys and values, where a cache is served.

        Such a cache is in bfloat16, and keeps what this selector needs alone.
        """
        config = dataclasses.replace(
            self.config(SELECTORS[name], EmaEntropy()), cache_dtype=jnp.bfloat16, keep=frozenset()
        )
        plants = jax.eval_shape(partial(empty, config)).plants
        [bytes_of] = costs(config.plants, self.model.weights, plants, config.by_mass_of)
        return bytes_of.summary / bytes_of.block

    def config(self, case: Case, law: Any) -> DecoderConfig:
        """Return a decoder of this model, which keeps all that any selector needs, and the logits."""
        b, length = self.tokens.shape
        controller = Controller(
            law=chain(law),
            selector=select.Guarded(case.selector, sinks=1, window=1, min_blocks=0),
            residual=case.residual,
        )
        return DecoderConfig(
            model=self.model.config,
            num_slots=b,
            batch=b,
            page_size=self.page_size,
            num_pages=b * -(-length // self.page_size) + 1,
            max_length=length,
            prefill_batch=self.prefilled,
            chunk=self.prefilled,
            max_steps=1,
            cache_dtype=jnp.float32,
            backend=self.model.decoder_config.backend,
            controller=controller,
            keep=frozenset({"codes", "surprisals", "logits"}),
        )

    def _start(self, config: DecoderConfig) -> DecodeState:
        state = empty(config)
        for slot, row in enumerate(self.tokens.tolist()):
            prompt = row[: self.prefilled + 1]
            [rows] = chunks.calls(config, slot, prompt[:-1])
            state, _ = prefill(config, self.model.weights, state, *rows)
            asked = request(config, prompt, limit=2**30, temperature=0.0, arrival=slot)
            state = slots.insert(config, state, jnp.int32(slot), asked)
        return state

    def _logits(self, config: DecoderConfig, weights: Any, state: DecodeState, forced: jax.Array) -> jax.Array:
        def advance(state: DecodeState, token: jax.Array) -> tuple[DecodeState, Any]:
            state, _ = step(config, weights, state)
            return replace(state, token=token), state.logits

        return jax.lax.scan(advance, state, forced)[1]

    def run(self, name: str, law: Any = None, given: jax.Array | float | None = None) -> Score:
        """Return the scores of a selector under a law of tolerance, or at a given tolerance, one for each token."""
        config = self.config(SELECTORS[name], law or EmaEntropy())

        def scores(weights: Any, state: DecodeState, dense: jax.Array, forced: jax.Array, given: jax.Array) -> Score:
            def advance(state: DecodeState, at: tuple) -> tuple[DecodeState, Score]:
                token, truth, tolerance_ = at
                if law is None:
                    state = replace(state, control=replace(state.control, tolerance=tolerance_))
                before = state.control.tolerance
                state, _ = step(config, weights, state)
                true, got = jax.nn.log_softmax(truth), jax.nn.log_softmax(state.logits)
                held = -(-state.length // self.page_size) * config.model.num_layers * config.model.num_kv_heads
                score = Score(
                    divergence=jnp.sum(jnp.exp(true) * (true - got), axis=-1),
                    agrees=(jnp.argmax(true, axis=-1) == jnp.argmax(got, axis=-1)).astype(jnp.float32),
                    loss=-jnp.take_along_axis(got, token[:, None], axis=-1)[:, 0],
                    share_read=state.signals.blocks_read / held,
                    kept_mass=state.signals.kept_mass,
                    entropy=state.signals.entropy,
                    tolerance=before,
                )
                return replace(state, token=token), score

            return jax.lax.scan(advance, state, (forced, dense, given))[1]

        key = name if law is None else (name, law)
        if key not in self.programs:
            self.programs[key] = jax.jit(scores)
        laws = slot_laws(config)
        control = jax.vmap(lambda own: fresh_control(config, own, jnp.float32(0)))(laws)
        state = replace(self.started, laws=laws, control=control)
        given = jnp.broadcast_to(jnp.asarray(0.0 if given is None else given, jnp.float32), self.forced.shape)
        return jax.device_get(self.programs[key](self.model.weights, state, self.dense, self.forced, given))

    def at_share(self, name: str, share: float) -> tuple[float, Score]:
        """Return the setting at which a selector reads a share of the blocks, and its scores there."""
        case = SELECTORS[name]
        low, high = (np.log(case.most), np.log(case.least)) if case.by_log else (case.most, case.least)
        best: tuple[float, Score] | None = None
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            setting = float(np.exp(middle)) if case.by_log else float(middle)
            score = self.run(name, given=setting)
            read = float(score.share_read.mean())
            if best is None or abs(read - share) < abs(float(best[1].share_read.mean()) - share):
                best = setting, score
            if abs(read - share) < 0.003:
                break
            low, high = (middle, high) if read > share else (low, middle)
        assert best is not None
        return best


def summary(score: Score, dense_loss: float) -> dict[str, float]:
    """Return the figures of a run: means over tokens, and the worst twentieth of the divergences."""
    tail = np.sort(score.divergence.reshape(-1))
    return {
        "share_read": float(score.share_read.mean()),
        "divergence": float(score.divergence.mean()),
        "divergence_worst_5_percent": float(tail[-len(tail) // 20 :].mean()),
        "agreement": float(score.agrees.mean()),
        "loss_added": float(score.loss.mean() - dense_loss),
        "least_kept_mass": float(score.kept_mass.min()),
    }


def compare_selectors(bench: Bench, names: list[str], dense_loss: float) -> list[dict[str, Any]]:
    """Return the selectors' figures at every share of blocks read."""
    lines = []
    for name in names:
        looked = bench.share_looked_at(name)
        for share in SHARES:
            setting, score = bench.at_share(name, share)
            found = {"selector": name, "wanted": share, "setting": setting, "share_looked_at": looked}
            lines.append(found | summary(score, dense_loss))
            print(".", end="", file=sys.stderr, flush=True)
    return lines


def compare_tolerances(bench: Bench, entropies: np.ndarray, dense_loss: float, share: float) -> list[dict[str, Any]]:
    """Return, per selector and spread, one amount of reading spent by entropy, evenly, at random and the other way.

    `difference` is the KL of entropy less that of the other, and `error` its standard error over rows.
    """
    low, high = (float(x) for x in np.percentile(entropies, [20, 80]))
    lines = []
    for name in CONTROLLED:
        looked = bench.share_looked_at(name)
        middle, _ = bench.at_share(name, share)
        for spread in SPREADS:
            least, greatest = middle / spread, min(middle * spread, 0.999)
            if name.startswith("paper"):
                laws = {"entropy": tolerance.EntropyThreshold(greatest, high)}
            else:
                laws = {
                    "entropy": tolerance.EntropyTolerance(least, greatest, low, high, rise=np.inf),
                    "reversed": tolerance.EntropyTolerance(greatest, least, low, high, rise=np.inf),
                }
            found = {way: bench.run(name, law=law) for way, law in laws.items()}
            driven = found["entropy"]
            found["constant"] = bench.at_share(name, float(driven.share_read.mean()))[1]
            rng = np.random.default_rng(0)
            shuffles = [bench.run(name, given=rng.permuted(np.asarray(driven.tolerance))) for _ in range(SEEDS)]
            found["shuffled"] = jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *shuffles)
            for way, score in found.items():
                apart = driven.divergence.mean(axis=0) - score.divergence.mean(axis=0)
                lines.append(
                    {"selector": name, "spread": spread, "tolerance": way, "share_looked_at": looked}
                    | summary(score, dense_loss)
                    | {"difference": float(apart.mean()), "error": float(apart.std(ddof=1) / np.sqrt(len(apart)))}
                )
            print(":", end="", file=sys.stderr, flush=True)
    return lines


def measure(name: str, text: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model on one text."""
    model = load(name, dtype="float32", max_num_seqs=2)
    tokens = rows(model, text, args.rows, model.config.max_positions)
    bench = Bench(model, tokens, args.page_size)
    dense = bench.run("top_mass", given=0.0)
    assert float(dense.share_read.min()) == 1.0
    loss = float(dense.loss.mean())
    return {
        "model": Path(name).name,
        "text": text.name,
        "context": tokens.shape[1],
        "positions": [bench.prefilled, tokens.shape[1] - 2],
        "dense_loss": loss,
        "dense_divergence": float(dense.divergence.mean()),
        "mean_entropy": float(dense.entropy.mean()),
        "selectors": compare_selectors(bench, args.selector or list(SELECTORS), loss),
        "tolerances": compare_tolerances(bench, dense.entropy, loss, 0.5),
    }


def main() -> None:
    parser = arguments.parser(__doc__, "case", "add", results="selection.json")
    parser.add_argument(
        "--selector", action="append", choices=list(SELECTORS), help="of the first table, repeatable (default: all)"
    )
    parser.add_argument("--page-size", type=arguments.count(), default=16)
    parser.add_argument("--rows", type=arguments.count(), default=8, help="rows of text at full context (default 8)")
    args = parser.parse_args()
    cases = []
    with arguments.refusals("measure_selection"):
        for name, text in args.case:
            cases.append(measure(name, Path(text), args))
            print(f"\n{tables.selectors(cases[-1:])}\n\n{tables.tolerances(cases[-1:])}", flush=True)
    if args.add:
        cases = with_others(args.output, cases)
    settings = {"page_size": args.page_size, "rows": args.rows, "shares": SHARES, "dtype": "float32", "seeds": SEEDS}
    write(args.output, "scripts/measure_selection.py", settings, cases=cases)


if __name__ == "__main__":
    main()
