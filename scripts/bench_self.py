"""What a model gains that drafts for itself, reading few blocks: tokens per second beside plain decoding, in turns.

    python scripts/bench_self.py [--resume]

Three parts. A random model of SmolLM-135M's shape goes on from caches that are filled with random keys and values to
`--contexts` tokens, in `--sequences` sequences. Its drafts are drawn from passes of its own, and then made to hold at a
given `--rates` of the tokens: as often as on the bundled model, half as often, and never; every text is checked to be
the plain one. It decodes in bursts, as a server does, and the laws of lengths are told by the clock what steps take,
and how the drafts of earlier texts fared: of every rate alone, from its first text on, which is told apart (`first`)
from the `--rounds` after it. Beside them stands what reading less would gain if it were trusted, under `certified` and
`adaptive`, and the share of blocks that each read. Single steps of the same model tell what bounds it: what one takes
that drafts so many tokens and verifies them, beside a plain one. Then the bundled model goes on from prompts of nearly
its whole context, freely: whatever holds. Which of a pair comes first changes from round to round.

Texts have `--tokens`, or fewer where a plain one would take more than `--seconds`, but `--fewest`. In every round each
way writes a text beside a plain one. Programs are compiled once for each number of sequences, with room for the longest
context whose caches take no more than `--gigabytes`; longer ones are left out. Every case is written down as it comes;
`--resume` keeps those that the file of results holds. The whole takes more than an hour on two cores.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from et_jax.control.draft import DraftLength
from et_jax.control.presets import preset
from et_jax.decode import drafter
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder, decoder, snapshot
from et_jax.decode.draft import Drafting, Pruned, by_roofline, rough_times
from et_jax.decode.fresh import law_numbers
from et_jax.decode.plant import PlantState, Weights
from et_jax.decode.sample import guess
from et_jax.decode.state import DecodeState, wants_drafts
from et_jax.evidence import draft_tables
from et_jax.io.texts import read_text
from et_jax.models.calibration import Calibration
from et_jax.models.params import Params, in_stacks
from et_jax.models.stacks import stacked_on
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import SamplingParams
from et_jax.serve.sizing import DEFAULT_PAGE_SIZE, read_sizes
from et_jax.serve.step_clock import StepClock
from et_jax.types import Table, replace
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.states import filled, with_random_pages

RATES = (0.9, 0.45, 0.0)  # of drafted tokens that hold: as on the bundled models, half as often, never
TRUSTED = ("certified", "adaptive")
SHORT = 16  # tokens of the texts by which programs are compiled
MOST, BURST, STEPS = 12, 0.05, 32  # tokens drafted; seconds; steps of a burst at most
FORCED = (0, 1, 4, 8, 12)  # tokens that a step drafts which is timed alone, in every sequence
STEPPED, FREE = 3, 5  # times as many rounds of single steps, and of the bundled model, which take little time
PROMPT = REPOSITORY / "README.md"  # of the bundled model's prompts


def configuration(context: int, sequences: int, tokens: int, **settings: Any) -> DecoderConfig:
    """Return a decoder that has room for so many sequences of so many tokens, and for those to come."""
    page = DEFAULT_PAGE_SIZE[jax.default_backend()]
    length = -(-(context + tokens + MOST + 1) // page) * page
    model, slots = dataclasses.replace(SMOLLM_135M, max_positions=length), max(2, sequences)
    heads = np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32)
    return DecoderConfig(
        model=model,
        num_slots=slots,
        batch=slots,
        page_size=page,
        num_pages=slots * length // page + 1,
        max_length=length,
        prefill_batch=page,
        chunk=page,
        max_steps=STEPS,
        cache_dtype=jnp.bfloat16,
        backend=pick(),
        calibration=Calibration(sensitivity=Table(heads)),
        stacked=stacked_on(jax.default_backend()),
        **settings,
    )


def random_weights(config: DecoderConfig) -> Params:
    """Return random weights, those of layers that are alike stacked where the decoder has them so."""
    weights = initialise(config.model, jax.random.key(0), jnp.bfloat16)
    return in_stacks(weights, config.model, lambda *each: jnp.stack(each)) if config.stacked else weights


def told(state: DecodeState, rows: Any, logits: Array, position: Int[Array, " r"]) -> Int[Array, " r"]:
    """Draw a token as a draft is drawn, and guess what stands in the text already, behind its end."""
    drawn = guess(state, rows, logits, position)
    text = rows.take(state.text)
    ahead = jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(drawn < 0, drawn, ahead)  # no draw is below 0, but no compiler knows


class Run:
    """A decoder that goes on from filled caches again and again, in bursts as a server does.

    `caches` are lent by whoever holds them; `begun` is its state without. What it learns of the times of steps and of
    drafts it knows in the texts that follow.
    """

    def __init__(self, decoder: Decoder, sequences: int, begun: DecodeState) -> None:
        self.decoder = decoder
        self.sequences, self.begun = sequences, begun
        self.clock = StepClock(decoder.config)
        self.laws: tuple[DraftLength, ...] = law_numbers(self.clock.begin() or begun.draft_laws)

    def anew(self) -> "Run":
        """Return one that goes on from there, and has learnt nothing."""
        return Run(self.decoder, self.sequences, self.begun)

    def _going_on(self, caches: list[PlantState], context: int, tokens: int) -> DecodeState:
        """Return the state of texts after a context, with the caches that are lent."""
        state = snapshot(self.begun)
        run = jnp.arange(len(state.active)) < self.sequences
        limit, length = (jnp.where(run, jnp.int32(number), 0) for number in (tokens, context))
        state = replace(state, active=run, limit=limit, length=length, draft_laws=jax.tree.map(jnp.copy, self.laws))
        fresh = jax.vmap(self.decoder.config.fresh_drafts, (0, None, 0))
        state = replace(state, draft=fresh(state.draft.most, state.draft_laws, length))
        return jax.block_until_ready(replace(state, plants=(caches.pop(),)))

    def compiled(self, weights: Weights, caches: list[PlantState]) -> None:
        """Compile what decodes, with drafts and without, by running no step."""
        state = self._going_on(caches, SHORT, 2)
        for decode in self.decoder.variants.values():
            state, _, _ = decode(weights, state, np.int32(0))
        caches.append(state.plants[0])

    def timed(
        self,
        weights: Weights,
        caches: list[PlantState],
        context: int,
        tokens: int,
        guesses: Int[np.ndarray, "b n"] | None = None,
    ) -> tuple[float, list[list[int]], dict[str, Any]]:
        """Return the seconds that texts after a context take, the texts, and what was read and drafted."""
        config, state = self.decoder.config, self._going_on(caches, context, tokens)
        if guesses is not None:
            ahead = slice(context + 1, context + 1 + guesses.shape[1])
            state = replace(state, text=state.text.at[: len(guesses), ahead].set(guesses))
        texts: list[list[int]] = [[] for _ in range(self.sequences)]
        counts = dict.fromkeys(("drafted", "accepted", "steps", "blocks"), 0)
        seconds, steps = 0.0, 1
        while min(map(len, texts)) < tokens:  # drafts of one hold more often than those of another
            began = time.perf_counter()
            variant = config.whole._replace(drafts=wants_drafts(state))
            state, output, ran = self.decoder.variants[variant](weights, state, np.int32(steps))
            output, ran = jax.device_get((output, ran))
            taken, ran = time.perf_counter() - began, int(ran)
            seconds, steps = seconds + taken, int(np.clip(BURST * ran / taken, 1, STEPS))
            laws = self.clock.note(output, ran, taken, variant)
            if laws is not None:
                self.laws = jax.tree.map(jnp.asarray, law_numbers(laws))
                state = replace(state, draft_laws=jax.tree.map(jnp.copy, self.laws))
            flat = (output.token, output.produced, output.signals.blocks_read)
            token, produced, read = (x[:ran].reshape(-1, config.num_slots) for x in flat)
            for slot, text in enumerate(texts):
                text += token[produced[:, slot], slot].tolist()
            found = (output.drafted[:ran].sum(), output.accepted[:ran].sum(), ran, read[produced].sum())
            counts = {name: counts[name] + int(more) for name, more in zip(counts, found, strict=True)}
        self._give_back(caches, state)
        blocks = config.plants[0].all_kv_heads * -(-context // config.page_size) * tokens * self.sequences
        return seconds, texts, {"share_read": counts.pop("blocks") / blocks} | counts

    def stepped(self, weights: Weights, caches: list[PlantState], context: int, rounds: int) -> dict[int, list[float]]:
        """Return the seconds of single steps after a context that draft as many tokens as they are told to, in turns.

        Before each goes one that is not counted: it notes which blocks the next one reads.
        """
        config, state = self.decoder.config, self._going_on(caches, context, MOST + 2)
        active, length = (jax.device_get(x) for x in (state.active, state.length))
        taken: dict[int, list[float]] = {drafted: [] for drafted in FORCED}
        for drafted, counted in itertools.product(FORCED * rounds, (False, True)):
            decode = self.decoder.variants[config.whole._replace(drafts=drafted > 0)]
            wanted = replace(state.draft, length=jnp.where(active, jnp.int32(drafted), 0))
            again = {"length": jnp.asarray(length), "generated": jnp.zeros_like(state.generated)}
            state = jax.block_until_ready(replace(state, draft=wanted, **again))
            began = time.perf_counter()
            state, output, _ = jax.block_until_ready(decode(weights, state, np.int32(1)))
            if counted:
                taken[drafted].append(time.perf_counter() - began)
                got = np.asarray(output.drafted)[0, 0, : self.sequences]
                if (got != drafted).any():
                    raise SystemExit(f"a step drafted {got} tokens where it was told to draft {drafted}")
        self._give_back(caches, state)
        return taken

    def _give_back(self, caches: list[PlantState], state: DecodeState) -> None:
        [plant] = state.plants
        caches.append(replace(plant, num_cached=jnp.zeros_like(plant.num_cached)))


def started(config: DecoderConfig) -> tuple[DecodeState, PlantState]:
    """Return a state whose slots have pages for all that they may hold, without its plant; and that plant."""
    state = with_random_pages(config, filled(config, 1, 0.0))
    return replace(state, plants=()), state.plants[0]


class Shapes:
    """All that is measured of so many sequences, at any context that there is room for: decoders compiled once."""

    def __init__(self, context: int, sequences: int, tokens: int) -> None:
        plain = configuration(context, sequences, tokens)
        times = rough_times(plain.batch, read_sizes(plain), passing=1.0, share=Pruned.share)
        how = Drafting(most=MOST, length=by_roofline(MOST, plain.batch, times), drafter=Pruned(), times=times)
        self.sequences, self.weights = sequences, (random_weights(plain),)
        begun, cache = started(plain)
        self.caches = [cache]
        laws = replace(plain, draft=how).draft_laws
        drafted = replace(
            begun,
            draft=replace(begun.draft, most=jnp.full(plain.num_slots, MOST, jnp.int32)),
            draft_laws=laws,
            heavy_blocks=jnp.zeros((plain.num_slots, *plain.mask_shape), jnp.uint32),
        )
        self.plain = Run(decoder(plain), sequences, begun)
        self.drafting = Run(decoder(replace(plain, draft=how)), sequences, drafted)
        self.plain.timed(self.weights, self.caches, SHORT, 2)  # compiled here, and below where a draft is what is told
        with mock.patch.object(drafter, "guess", told):
            self.drafting.compiled(self.weights, self.caches)
        self._trusted: dict[str, tuple[Run, list[PlantState]]] = {}

    def trusted(self, control: str) -> tuple[Run, list[PlantState]]:
        """Return what reads less and is trusted, and its caches."""
        if control not in self._trusted:
            config = replace(self.plain.decoder.config, controller=preset(control))
            state, cache = started(config)
            run, caches = Run(decoder(config), self.sequences, state), [cache]
            run.timed(self.weights, caches, SHORT, 2)
            self._trusted = {control: (run, caches)}  # one at a time: each has a cache of its own
        return self._trusted[control]

    def length(self, context: int, most: int, fewest: int, seconds: float) -> int:
        """Return of how many tokens plain texts take so many seconds, from the `fewest` to `most`."""
        taken, _, _ = self.plain.timed(self.weights, self.caches, context, 4)
        return int(np.clip(seconds * 4 / taken, fewest, most))

    def at_rates(self, context: int, tokens: int, rounds: int, rates: list[float]) -> Iterator[dict[str, Any]]:
        """Yield what drafts gain that hold at each rate."""
        _, expected, _ = self.plain.timed(self.weights, self.caches, context, tokens)

        runs = {rate: self.drafting.anew() for rate in rates}

        def pair(number: int, rate: float) -> tuple[float, float]:
            right = np.random.default_rng(1).random(np.shape(expected)) < rate
            wrong = (np.asarray(expected) + 1) % SMOLLM_135M.vocab_size
            guesses = np.where(right, expected, wrong).astype(np.int32)

            def drafting() -> float:
                seconds, texts, facts[rate] = runs[rate].timed(self.weights, self.caches, context, tokens, guesses)
                if texts != expected:
                    raise SystemExit(f"drafts that hold at {rate} changed a text at {context} tokens")
                return seconds

            return in_turns(number, lambda: self.plain.timed(self.weights, self.caches, context, tokens)[0], drafting)

        facts: dict[float, dict[str, Any]] = {}
        pairs: dict[float, list[tuple[float, float]]] = {rate: [] for rate in rates}
        for number, rate in itertools.product(range(1 + rounds), rates):
            pairs[rate].append(pair(number, rate))
        for rate in rates:
            (plain, seconds), *others = pairs[rate]
            case = self._case(context, tokens, f"{rate:g}", others)
            yield case | facts[rate] | {"rate": rate, "first": plain / seconds}

    def at_steps(self, context: int, rounds: int) -> dict[str, Any]:
        """Return what single steps take that draft so many tokens."""
        taken = self.drafting.anew().stepped(self.weights, self.caches, context, rounds)
        seconds = {str(drafted): statistics.median(each) for drafted, each in taken.items()}
        return {"context": context, "sequences": self.sequences, "seconds": seconds}

    def at_trust(self, context: int, tokens: int, rounds: int, control: str) -> dict[str, Any]:
        """Return what a controller gains that reads less and is trusted."""
        run, caches = self.trusted(control)
        pairs, facts = [], {}
        for _ in range(rounds):
            plain, _, _ = self.plain.timed(self.weights, self.caches, context, tokens)
            seconds, _, facts = run.timed(self.weights, caches, context, tokens)
            pairs.append((plain, seconds))
        return self._case(context, tokens, control, pairs) | facts

    def _case(self, context: int, tokens: int, way: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
        return {
            "context": context,
            "sequences": self.sequences,
            "way": way,
            "tokens": tokens,
            "tokens_per_second": self.sequences * tokens / statistics.median(plain for plain, _ in pairs),
            "ratio": statistics.median(plain / other for plain, other in pairs),
            "ratios": [plain / other for plain, other in pairs],
        }


def in_turns(number: int, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Return what both give, the other one first in every second round."""
    found = [each() for each in (one, other)[:: -1 if number % 2 else 1]]
    first, second = found[:: -1 if number % 2 else 1]
    return first, second


def of_bundled(prompts: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return what the bundled model gains on prompts that leave room for so many tokens, greedily and sampled."""
    plain, drafted = (load(max_num_seqs=1, prefix_cache=False, draft=draft) for draft in (None, "self"))
    words = plain.tokenizer.encode(read_text(PROMPT, "The prompt"))
    size = plain.max_model_len - tokens
    words = words * -(-size * prompts // len(words))
    found = []
    for number in range(prompts):
        prompt = words[number * size :][:size]
        for heat in (0.0, 0.7):
            params = SamplingParams(max_tokens=tokens, temperature=heat, seed=number, ignore_eos=True)
            [expected], [got] = plain.generate([prompt], params), drafted.generate([prompt], params)
            if got.token_ids != expected.token_ids:
                raise SystemExit(f"drafts changed the text after prompt {number} at {heat}")
            each = [partial(seconds_of, model, prompt, params) for model in (plain, drafted)]
            pairs = [in_turns(number, *each) for number in range(FREE * rounds)]
            found.append(
                {
                    "prompt": number,
                    "temperature": heat,
                    "drafted": sum(row.drafted for row in got.trace),
                    "accepted": sum(row.accepted for row in got.trace),
                    "tokens_per_second": (tokens - 1) / statistics.median(pair[0] for pair in pairs),
                    "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
                }
            )
            print(found[-1], flush=True)
    return found


def seconds_of(model: Model, prompt: list[int], params: SamplingParams) -> float:
    """Return the seconds that a text takes beyond its first token, which comes with the reading of the prompt."""
    seconds = []
    for settings in (replace(params, max_tokens=1), params):
        began = time.perf_counter()
        model.generate([prompt], settings)
        seconds.append(time.perf_counter() - began)
    return seconds[1] - seconds[0]


def fits(context: int, sequences: int, tokens: int, gigabytes: float) -> bool:
    """Return whether the caches of so many sequences take no more than so many gigabytes."""
    config = configuration(context, sequences, tokens)
    return read_sizes(config).token * config.page_size * config.num_pages <= 1e9 * gigabytes


def main() -> None:
    parser = arguments.parser(__doc__, results="self_drafting.json")
    parser.add_argument("--part", choices=["filled", "steps", "bundled"], help="one alone (default all)")
    parser.add_argument("--contexts", type=arguments.count(), nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--sequences", type=arguments.count(), nargs="+", default=[1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--tokens", type=arguments.count(2), default=128, help="of a text at most (default 128)")
    parser.add_argument("--seconds", type=float, default=6.0, help="that a plain text takes (default 6)")
    parser.add_argument("--fewest", type=arguments.count(2), default=24, help="tokens of a text (default 24)")
    parser.add_argument("--rounds", type=arguments.count(), default=3)
    parser.add_argument("--prompts", type=arguments.count(), default=3, help="of the bundled model (default 3)")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="that a cache may take (default 8)")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the file of results holds")
    args = parser.parse_args()
    if not all(0.0 <= rate <= 1.0 for rate in args.rates):
        parser.error("argument --rates: each is a share of the drafted tokens, from 0 to 1")
    try:
        kept = json.loads(args.output.read_text(encoding="utf-8")) if args.resume and args.output.exists() else {}
    except ValueError as error:
        raise SystemExit(
            f"{args.output} holds no results ({error}); leave out --resume, or name another file."
        ) from error
    cases, steps, free = (kept.get(part, []) for part in ("cases", "steps", "free"))
    settings = {"rounds": args.rounds, "tokens": args.tokens, "seconds": args.seconds, "most": MOST}
    settings |= {"page_size": DEFAULT_PAGE_SIZE[jax.default_backend()], "share": Pruned.share, "mass": Pruned.mass}
    left_out = []

    def keep(*more: dict[str, Any]) -> None:
        for case in more:
            print(case, flush=True)
            cases.append(case)
        write(args.output, "scripts/bench_self.py", settings, cases=cases, steps=steps, left_out=left_out, free=free)

    for sequences in args.sequences if args.part != "bundled" else ():
        stepped = {case["context"] for case in steps if case["sequences"] == sequences}
        done = {(case["context"], case["way"]) for case in cases if case["sequences"] == sequences}
        room = [context for context in args.contexts if fits(context, sequences, args.tokens, args.gigabytes)]
        left_out += [[context, sequences] for context in args.contexts if context not in room]
        ways = [*(f"{rate:g}" for rate in args.rates), *(TRUSTED if sequences == 1 else ())]
        missing = {context: [way for way in ways if (context, way) not in done] for context in room}
        missing = missing if args.part != "steps" else {}
        alone = [context for context in room if context not in stepped and args.part != "filled"]
        if not alone and not any(missing.values()):
            continue
        shapes = Shapes(max(room), sequences, args.tokens)
        for context in alone:
            steps.append(shapes.at_steps(context, STEPPED * args.rounds))
            print(steps[-1], flush=True)
            keep()
        lengths = {one: shapes.length(one, args.tokens, args.fewest, args.seconds) for one in missing if missing[one]}
        for context, tokens in lengths.items():
            rates = [rate for rate in args.rates if f"{rate:g}" in missing[context]]
            if rates:
                keep(*shapes.at_rates(context, tokens, args.rounds, rates))
        for control, (context, tokens) in itertools.product(TRUSTED, lengths.items()):
            if control in missing[context]:
                keep(shapes.at_trust(context, tokens, args.rounds, control))
    if args.part in (None, "bundled"):
        free[:] = of_bundled(args.prompts, args.tokens, args.rounds)
    keep()
    tables = draft_tables.self_drafting(cases), draft_tables.self_steps(steps), draft_tables.self_drafting_free(free)
    print(*tables, sep="\n\n")


if __name__ == "__main__":
    main()
