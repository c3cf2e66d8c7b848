"""What a model gains that drafts for itself, reading few blocks: tokens per second beside plain decoding, in turns.

    python scripts/bench_self.py

Two parts. A random model of SmolLM-135M's shape goes on from caches that are filled with random keys and values to
`--contexts` tokens, in `--sequences` sequences. Its drafts are drawn from passes of its own, and then made to hold at a
given `--rates` of the tokens: as often as on the bundled model, half as often, and never; every text is checked to be
the plain one. Beside them stands what reading less would gain if it were trusted, under `certified` and `adaptive`,
and the share of blocks that each read. Then the bundled model goes on from prompts of nearly its whole context, freely:
whatever holds. A shape whose caches take more than `--gigabytes` is left out.
"""

import dataclasses
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from et_jax.control.presets import preset
from et_jax.decode import drafter
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder, decoder, snapshot
from et_jax.decode.draft import Drafting, Pruned, by_roofline
from et_jax.decode.plant import Weights
from et_jax.decode.sample import guess
from et_jax.decode.state import DecodeState
from et_jax.evidence import arguments, draft_tables
from et_jax.evidence.results import REPOSITORY, write
from et_jax.evidence.shapes import SMOLLM_135M
from et_jax.evidence.states import filled, with_random_pages
from et_jax.io.texts import read_text
from et_jax.models.calibration import Calibration
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import SamplingParams
from et_jax.serve.sizing import read_sizes
from et_jax.types import Table, replace

RATES = (0.9, 0.45, 0.0)  # of drafted tokens that hold: as on the bundled models, half as often, never
TRUSTED = ("certified", "adaptive")
PAGE, MOST = 16, 12
PROMPT = REPOSITORY / "README.md"  # of the bundled model's prompts


def configuration(context: int, sequences: int, tokens: int, **settings: Any) -> DecoderConfig:
    """Return a decoder that has room for so many sequences of so many tokens, and for those to come."""
    length = -(-(context + tokens + MOST + 1) // PAGE) * PAGE
    model, slots = dataclasses.replace(SMOLLM_135M, max_positions=length), max(2, sequences)
    heads = np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32)
    return DecoderConfig(
        model=model,
        num_slots=slots,
        batch=slots,
        page_size=PAGE,
        num_pages=slots * length // PAGE + 1,
        max_length=length,
        prefill_batch=PAGE,
        chunk=PAGE,
        max_steps=tokens,
        cache_dtype=jnp.bfloat16,
        backend=pick(),
        calibration=Calibration(sensitivity=Table(heads)),
        **settings,
    )


def told(state: DecodeState, rows: Any, logits: Array, position: Int[Array, " r"]) -> Int[Array, " r"]:
    """Draw a token as a draft is drawn, and guess what stands in the text already, behind its end."""
    drawn = guess(state, rows, logits, position)
    text = rows.take(state.text)
    ahead = jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(drawn < 0, drawn, ahead)  # no draw is below 0, but no compiler knows


class Run:
    """A decoder that goes on from filled caches again and again; `caches` are lent by whoever holds them."""

    def __init__(self, config: DecoderConfig, sequences: int, context: int, tokens: int, begun: DecodeState) -> None:
        self.decoder: Decoder = decoder(config)
        self.sequences, self.context, self.tokens, self.begun = sequences, context, tokens, begun

    def timed(
        self, weights: Weights, caches: list[Any], guesses: Int[np.ndarray, "b n"] | None = None
    ) -> tuple[float, list[list[int]], dict[str, Any]]:
        """Return the seconds that all texts take, the texts, and what was read and drafted."""
        state, config = snapshot(self.begun), self.decoder.config
        if guesses is not None:
            assert state.text is not None
            ahead = slice(self.context + 1, self.context + 1 + guesses.shape[1])
            state = replace(state, text=state.text.at[: len(guesses), ahead].set(guesses))
        state = jax.block_until_ready(with_caches(state, [caches.pop()]))
        began = time.perf_counter()
        after, output, ran = jax.block_until_ready(self.decoder.decode(weights, state, self.tokens))
        seconds = time.perf_counter() - began
        caches.append(after.plants[0].cache)
        told = (output.token, output.produced, output.signals.blocks_read)
        token, produced, read = (np.asarray(x)[: int(ran)].reshape(-1, config.num_slots) for x in told)
        blocks = config.plants[0].all_kv_heads * -(-self.context // PAGE)
        texts = [token[produced[:, slot], slot].tolist() for slot in range(self.sequences)]
        drafted, accepted = (int(np.asarray(x)[: int(ran)].sum()) for x in (output.drafted, output.accepted))
        share = float(read[produced].mean() / blocks)
        return seconds, texts, {"share_read": share, "drafted": drafted, "accepted": accepted, "steps": int(ran)}


def with_caches(state: DecodeState, caches: list[Any]) -> DecodeState:
    """Return the state with other caches of its models, or with none, for None."""
    return replace(
        state, plants=tuple(replace(one, cache=cache) for one, cache in zip(state.plants, caches, strict=True))
    )


def started(config: DecoderConfig, sequences: int, context: int, tokens: int) -> tuple[DecodeState, Any]:
    """Return a state in which so many sequences are about to go on from a full context, without its cache; and that."""
    state = with_random_pages(config, filled(config, context, 0.0))
    run = jnp.arange(config.num_slots) < sequences
    state = replace(state, active=run, limit=jnp.full_like(state.limit, tokens))
    state = replace(state, length=jnp.where(run, state.length, 0))
    cache = state.plants[0].cache
    return with_caches(state, [None]), cache


def compared(context: int, sequences: int, tokens: int, rounds: int, rates: list[float]) -> list[dict[str, Any]]:
    """Return tokens per second of plain decoding, and what it gains at every rate at which drafts hold."""
    plain = configuration(context, sequences, tokens)
    how = Pruned()
    length = by_roofline(MOST, plain.batch, read_sizes(plain), how.share)
    drafting = replace(plain, draft=Drafting(most=MOST, length=length, drafter=how))
    weights = (initialise(plain.model, jax.random.key(0), jnp.bfloat16),)
    begun, cache = started(plain, sequences, context, tokens)
    slots = plain.num_slots
    drafted = replace(
        begun,
        text=jnp.zeros((slots, plain.max_length), jnp.int32),
        draft=Drafting(most=MOST, length=length, drafter=how).started(jnp.full(slots, MOST, jnp.int32)),
        heavy_blocks=jnp.zeros((slots, *plain.mask_shape), jnp.uint32),
    )
    caches = [cache]
    before, after = (
        Run(config, sequences, context, tokens, state) for config, state in ((plain, begun), (drafting, drafted))
    )
    _, expected, _ = before.timed(weights, caches)
    found = []
    for rate in rates:
        right = np.random.default_rng(1).random(np.shape(expected)) < rate
        guesses = np.where(right, expected, (np.asarray(expected) + 1) % plain.model.vocab_size).astype(np.int32)
        with mock.patch.object(drafter, "guess", told):
            _, texts, facts = after.timed(weights, caches, guesses)
        if texts != expected:
            raise SystemExit(f"drafts that hold at {rate} changed a text at {context} tokens")
        pairs = [(before.timed(weights, caches)[0], after.timed(weights, caches, guesses)[0]) for _ in range(rounds)]
        found.append(case(context, sequences, tokens, f"{rate:g}", pairs) | facts | {"rate": rate})
        print(found[-1], flush=True)
    for control in TRUSTED if sequences == 1 else ():
        config = replace(configuration(context, sequences, tokens), controller=preset(control))
        state, own = started(config, sequences, context, tokens)
        trusted, others = Run(config, sequences, context, tokens, state), [own]
        _, _, facts = trusted.timed(weights, others)
        pairs = [(before.timed(weights, caches)[0], trusted.timed(weights, others)[0]) for _ in range(rounds)]
        found.append(case(context, sequences, tokens, control, pairs) | facts)
        print(found[-1], flush=True)
    return found


def case(context: int, sequences: int, tokens: int, way: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of one way to decode beside plain decoding."""
    return {
        "context": context,
        "sequences": sequences,
        "way": way,
        "tokens_per_second": sequences * tokens / statistics.median(plain for plain, _ in pairs),
        "ratio": statistics.median(plain / other for plain, other in pairs),
        "ratios": [plain / other for plain, other in pairs],
    }


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
            pairs = [tuple(seconds_of(model, prompt, params) for model in (plain, drafted)) for _ in range(rounds)]
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


def main() -> None:
    parser = arguments.parser(__doc__, results="self_drafting.json")
    parser.add_argument("--part", choices=["filled", "bundled"], help="of the two parts, one alone (default both)")
    parser.add_argument("--contexts", type=arguments.count(), nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--sequences", type=arguments.count(), nargs="+", default=[1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--tokens", type=arguments.count(2), default=128, help="of every text (default 128)")
    parser.add_argument("--rounds", type=arguments.count(), default=5)
    parser.add_argument("--prompts", type=arguments.count(), default=3, help="of the bundled model (default 3)")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="that a cache may take (default 8)")
    args = parser.parse_args()
    cases, left_out = [], []
    for context in args.contexts if args.part != "bundled" else ():
        for sequences in args.sequences:
            config = configuration(context, sequences, args.tokens)
            if read_sizes(config).token * PAGE * config.num_pages > 1e9 * args.gigabytes:
                left_out.append([context, sequences])
                continue
            cases += compared(context, sequences, args.tokens, args.rounds, args.rates)
    free = of_bundled(args.prompts, args.tokens, args.rounds) if args.part != "filled" else []
    print(draft_tables.self_drafting(cases), draft_tables.self_drafting_free(free), sep="\n\n")
    settings = {"rounds": args.rounds, "tokens": args.tokens, "page_size": PAGE, "most": MOST}
    settings |= {"share": Pruned.share, "mass": Pruned.mass}
    write(args.output, "scripts/bench_self.py", settings, cases=cases, left_out=left_out, free=free)


if __name__ == "__main__":
    main()
