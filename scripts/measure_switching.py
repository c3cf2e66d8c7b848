"""Entropy Adaptive Decoding against other ways of giving a model the same share of the words, on this device.

    python scripts/measure_switching.py --text HELD_OUT

Two models with one tokenizer take turns (Simonds 2025): as printed, and with the guards of `switch.Hysteresis`, at
eight bounds. Two that know nothing of entropy give the model the share it has as printed: "random" tosses a coin every
ten tokens, "position" gives it the first words. Lossless drafting stands at the end: all words are the model's own.

On texts of `--tokens` tokens at temperature 0.7, quality is agreement, the share of tokens which the model itself would
have said there (its race has the same noise), and the mean log-probability it gives them, in nats. On the tasks it is
right answers, greedy, beside those of a coin that gives the model the share of the words that it has in these answers:
shares on tasks are not those on texts. What it takes is bytes of weights and caches and FLOPs of decoding, over those
of the model alone: of one text at a time, and of eight side by side. Of either model's own texts the share of windows
is told whose mean entropy is at most the paper's bound.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.control.controller import Controller
from et_jax.control.switch import MODEL, SMALL, AsPrinted, Hysteresis, Switch, SwitchState
from et_jax.decode.sampling import fold_key, plain, sample_token
from et_jax.evidence import serving_tables
from et_jax.serve.completions import Completion
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.tasks.asking import counter, evaluate, grid
from et_jax.tasks.base import Example
from et_jax.tasks.generators import TASKS
from et_jax.types import Number, replace, value
from scripts.measuring import arguments, paired
from scripts.measuring.results import write
from scripts.measuring.text import cut, held_out_logits, texts

BITS = (99.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 0.25)  # bounds as the paper gives them
TEMPERATURE = 0.7
RUN = 10  # tokens between two coins, the paper's least run
WINDOW, BOUND = 5, 0.25 * math.log(2)  # tokens whose mean the paper holds against its bound, in nats


class _Counting(Switch):
    """A switch that counts tokens and knows nothing of entropy; `since` is never reset."""

    def started(self) -> SwitchState:
        """Return the small model as the speaker, until the first prediction is known."""
        return SwitchState(
            speaker=jnp.asarray(SMALL, jnp.int32), window=jnp.zeros(1, jnp.float32), since=jnp.asarray(0, jnp.int32)
        )

    def before(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Decide who has the first word, once; `window` tells that it is decided."""
        undecided = (state.since == 0) & (state.window[0] == 0)
        first = jnp.where(undecided, self.speaker(state, entropy), state.speaker)
        return replace(state, speaker=first, window=jnp.ones_like(state.window))

    def after(self, state: SwitchState, entropy: Float[Array, ""]) -> SwitchState:
        """Return the state after a token."""
        counted = replace(state, since=state.since + 1)
        return replace(counted, speaker=self.speaker(counted, entropy))

    def speaker(self, state: SwitchState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return who speaks at the `since`-th token."""
        raise NotImplementedError


@value
class ByCoin(_Counting):
    """The model with probability `share`, by a coin every ten tokens: the last bits of the entropy, scrambled."""

    share: Number

    def speaker(self, state: SwitchState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Toss where a run begins."""
        bits = jax.lax.bitcast_convert_type(entropy, jnp.uint32) * jnp.uint32(2654435769)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
        coin = (bits >> 8).astype(jnp.float32) * 2.0**-24
        tossed = jnp.where(coin < self.share, MODEL, SMALL)
        return jnp.where(state.since % RUN == 0, tossed, state.speaker)


@value
class ByPosition(_Counting):
    """The model up to token number `words`, then the small one."""

    words: Number

    def speaker(self, state: SwitchState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Look how many tokens there are."""
        return jnp.where(state.since.astype(jnp.float32) < self.words, MODEL, SMALL)


def agreement(
    model: Model, prompts: Int[np.ndarray, "r t"], said: list[Completion]
) -> tuple[Float[np.ndarray, " r"], Float[np.ndarray, " r"]]:
    """Return of each text the share of tokens that the model would have said, and its mean log-probability of one."""
    tokens = np.array([one.token_ids for one in said], np.int32)
    number, length = tokens.shape
    logits, targets = held_out_logits(model, np.concatenate([prompts, tokens], axis=1))
    own = replace(
        plain((number,)), key=jnp.stack([jnp.zeros(number, jnp.uint32), jnp.arange(number, dtype=jnp.uint32)], 1)
    )
    key = jnp.repeat(jax.vmap(fold_key, in_axes=(0, None))(own, jnp.int32(0)).key, length, axis=0)
    position = jnp.tile(jnp.arange(length, 2 * length, dtype=jnp.int32), number)
    heat = jnp.full(number * length, TEMPERATURE, jnp.float32)
    would = jax.jit(sample_token)(logits, heat, jnp.full_like(heat, -jnp.inf), key, position)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    same, likely = (np.asarray(x, np.float64).reshape(tokens.shape).mean(1) for x in (would == targets, log_p))
    return same, likely


def certain_windows(said: list[Completion]) -> float:
    """Return the share of windows in which the paper's small model would speak."""
    means = [np.convolve([row.entropy for row in one.trace], np.full(WINDOW, 1 / WINDOW), mode="valid") for one in said]
    return float(np.mean(np.concatenate(means) <= BOUND))


def on_tasks(model: Model, asked: list[tuple[int, Example]], control: Controller | None) -> dict[str, Any]:
    """Return right answers, and the large model's share of their words; None where nobody takes turns."""
    answers = evaluate(model, asked, control=control)
    shares = [answer.share_by_model for answer in answers if answer.share_by_model is not None]
    return {"right": sum(answer.right for answer in answers), "task_share": float(np.mean(shares)) if shares else None}


def measure(
    models: dict[str, Model],
    single: dict[str, Model],
    prompts: Int[np.ndarray, "r t"],
    asked: list[tuple[int, Example]],
) -> list[dict]:
    """Return a line for either model alone, for every arm, and for drafting; `single` serve a text at a time."""
    length = prompts.shape[1]
    requests = [
        GenerationRequest(
            prompt=prompt.tolist(),
            params=SamplingParams(max_tokens=length, temperature=TEMPERATURE, ignore_eos=True, seed=seed),
        )
        for seed, prompt in enumerate(prompts)
    ]
    lines: list[dict[str, Any]] = []
    base: dict[str, float] = {}

    def line(name: str, role: str, bits: float | None = None, control: Controller | None = None) -> dict[str, Any]:
        model = models[role]
        said = model.generate(requests, control=control)
        apart = [done for request in requests for done in single[role].generate([request], control=control)]
        if [one.token_ids for one in said] != [one.token_ids for one in apart]:
            raise SystemExit(f"{name}: a text in company is not the one alone")
        same, likely = agreement(models["model"], prompts, said)
        taken = {
            f"{field}_{company}": sum(getattr(one, field) for one in each)
            for company, each in (("alone", apart), ("of_eight", said))
            for field in ("cost", "flops")
        }
        for field, sum_of in taken.items():
            base.setdefault(field, sum_of)
        rows = [row for one in said for row in one.trace]
        spoken = [not row.by_small for row in rows if row.by_small is not None]
        found = {
            "speaker": name,
            "bits": bits,
            "share": float(np.mean(spoken)) if spoken else float(name != "the small model"),
            "agreement": [float(same.mean()), *paired.interval(same)],
            "log_probability": [float(likely.mean()), *paired.interval(likely)],
            **{field: sum_of / base[field] for field, sum_of in taken.items()},
            "certain_windows": certain_windows(said),
            **on_tasks(model, asked, control),
        }
        lines.append(found)
        print(found, flush=True)
        return found

    line("the model", "model")
    line("the small model", "small")
    bounds = [(bits, bits * math.log(2)) for bits in BITS]
    # "both" keeps the prompts it has read while laws differ in numbers alone
    shares = [line("as printed", "both", bits, Controller(switch=AsPrinted(tau)))["share"] for bits, tau in bounds]
    for bits, tau in bounds:
        line("guarded", "both", bits, Controller(switch=Hysteresis(tau)))
    for bits, share in zip(BITS, shares, strict=True):
        line("random", "both", bits, Controller(switch=ByCoin(share)))
    for bits, share in zip(BITS, shares, strict=True):
        line("position", "both", bits, Controller(switch=ByPosition(share * length)))
    line("the model, drafted for", "drafted")
    for found in lines:
        if found["speaker"] in ("as printed", "guarded"):
            tossed = on_tasks(models["both"], asked, Controller(switch=ByCoin(found["task_share"])))
            found["by_coin"] = tossed
            print(found["speaker"], found["bits"], found["task_share"], found["right"], *tossed.values(), flush=True)
    return lines


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    parser = arguments.parser(__doc__, "model", results="switching.json")
    parser.add_argument("--small", default="bundled-small")
    parser.add_argument("--text", type=Path, required=True, help="what the prompts are taken from: held-out works")
    parser.add_argument("--prompts", type=arguments.count(), default=40)
    parser.add_argument(
        "--tokens", type=arguments.count(), default=128, help="of a prompt, and of a text (default 128)"
    )
    parser.add_argument(
        "--samples", type=arguments.count(), default=8, help="questions of every task at each of 5 depths (default 8)"
    )
    parser.add_argument("--length", type=arguments.count(), default=512, help="tokens of a question (default 512)")
    args = parser.parse_args()
    with arguments.refusals("measure_switching"):
        sizes = {"max_model_len": max(2 * args.tokens, args.length + 128), "num_pages": 8000}
        models, single = (
            {
                "model": load(args.model, max_num_seqs=number, **sizes),
                "small": load(args.small, max_num_seqs=number, **sizes),
                "both": load(args.model, max_num_seqs=number, small=args.small, control="ead", **sizes),
                "drafted": load(args.model, max_num_seqs=number, draft=args.small, draft_tokens=3, **sizes),
            }
            for number in (8, 1)
        )
        prompts = cut(models["model"], str(args.text), texts(args.text), args.prompts, args.tokens)
        asked = grid(counter(models["model"]), list(TASKS), [args.length], depths=5, samples=args.samples)
        lines = measure(models, single, prompts, asked)
    print(serving_tables.switching(lines, len(asked)))
    settings = {name: getattr(args, name) for name in ("model", "small", "prompts", "tokens", "samples", "length")}
    write(args.output, "scripts/measure_switching.py", settings, lines=lines, questions=len(asked))


if __name__ == "__main__":
    main()
