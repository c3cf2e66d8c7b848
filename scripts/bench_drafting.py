"""What drafts save: tokens per second with drafts and by plain decoding, turn by turn, on this device.

    python scripts/bench_drafting.py

Two parts. The bundled model at batch 1 continues prompts that were written down in `benchmarks/prompts/drafting.json`
before any figure: greedily those that ask for copies and for summaries, with drafts by lookup; freely, at temperature
0.7, the openings of stories, with drafts by bundled-small, and by lookup, which are worth nothing there. Texts that run
in a circle are counted apart. Then a random model of SmolLM-135M's shape, whose drafts hold at a given rate: a drafter
that knows the text, and is wrong at random places. Every text is checked to be the plain one.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from et_jax.control.draft import DraftLength, FixedLength
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder, decoder
from et_jax.decode.draft import Drafting, by_acceptance
from et_jax.decode.request import request
from et_jax.decode.state import DecodeState
from et_jax.evidence import draft_tables
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.serve.chunks import calls
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import SamplingParams
from et_jax.types import replace
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, RESULTS, write
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.text import in_a_circle

PROMPTS = REPOSITORY / "benchmarks/prompts/drafting.json"
LOOKUP, SMALL = "lookup", "bundled-small"
DRAFTERS, FREE = (None, LOOKUP, SMALL), (SMALL, LOOKUP)
TEMPERATURE = 0.7  # of free texts
TOKENS = 120  # of every text of the bundled model
PROMPT, LENGTH = 32, 48  # tokens of the random model's prompts, and of its texts


def of_prompts(rounds: int, most: int) -> list[dict[str, Any]]:
    """Return tokens per second of the bundled model on every kind of prompt, with drafts and without."""
    models = {name: load(max_num_seqs=1, prefix_cache=False, draft=name, draft_tokens=most) for name in DRAFTERS}
    found = []
    for kind, prompts in json.loads(PROMPTS.read_text(encoding="utf-8")).items():
        for drafter in FREE if kind == "free" else (LOOKUP,):
            for number, prompt in enumerate(prompts):
                heat = TEMPERATURE if kind == "free" else 0.0
                params = SamplingParams(max_tokens=TOKENS, temperature=heat, seed=number, ignore_eos=True)
                found.append(compared(models[None], models[drafter], prompt, params, rounds))
                found[-1] |= {"kind": kind, "drafter": drafter, "prompt": number}
                print(found[-1], flush=True)
    return found


def compared(plain: Model, drafted: Model, prompt: str, params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Return what drafts save on one text, turn by turn."""
    [expected], [got] = plain.generate(prompt, params), drafted.generate(prompt, params)
    if got.token_ids != expected.token_ids:
        raise SystemExit(f"drafts changed the text after {prompt!r}")
    seconds = [tuple(timed(model, prompt, params) for model in (plain, drafted)) for _ in range(rounds)]
    return {
        "circle": in_a_circle(expected.token_ids),
        "drafted": sum(row.drafted for row in got.trace),
        "accepted": sum(row.accepted for row in got.trace),
        "tokens_per_second": (TOKENS - 1) / statistics.median(pair[0] for pair in seconds),
        "ratio": statistics.median(pair[0] / pair[1] for pair in seconds),
    }


def timed(model: Model, prompt: str, params: SamplingParams) -> float:
    """Return the seconds that a text takes beyond its first token, which comes with the reading of the prompt."""
    seconds = []
    for settings in (replace(params, max_tokens=1), params):
        began = time.perf_counter()
        model.generate(prompt, settings)
        seconds.append(time.perf_counter() - began)
    return seconds[1] - seconds[0]


def told(text: Int[Array, "r n"], newest: Int[Array, " r"], most: int) -> Int[Array, "r t"]:
    """Guess what stands in the text already, behind its end: whoever begins it writes there what is to be guessed."""
    ahead = newest[:, None] + 1 + jnp.arange(most, dtype=jnp.int32)
    return jnp.take_along_axis(text, jnp.minimum(ahead, text.shape[1] - 1), axis=1)


def wrong_at_random(texts: Int[np.ndarray, "b n"], rate: float) -> Int[np.ndarray, "b n"]:
    """Return texts of which each token is right at this rate."""
    right = np.random.default_rng(1).random(texts.shape) < rate
    return np.where(right, texts, (texts + 1) % SMOLLM_135M.vocab_size)


def random_model(batch: int) -> tuple[DecoderConfig, Params]:
    """Return the decoder and the weights of SmolLM-135M's shape."""
    params = initialise(SMOLLM_135M, jax.random.key(0), jnp.bfloat16)
    slots = max(2, batch)
    blocks = (PROMPT + LENGTH) // 16
    config = DecoderConfig(
        model=SMOLLM_135M,
        num_slots=slots,
        batch=slots,
        page_size=16,
        num_pages=slots * blocks + 1,
        max_length=PROMPT + LENGTH,
        prefill_batch=PROMPT,
        chunk=16,
        max_steps=LENGTH,
        cache_dtype=jnp.bfloat16,
        backend=pick(),
    )
    return config, params


def begun(d: Decoder, params: Params, batch: int, guesses: Int[np.ndarray, "b n"] | None) -> DecodeState:
    """Return a state in which `batch` sequences are about to start, with what is to be guessed of their texts."""
    state = d.empty()
    for slot in range(batch):
        ids = np.random.default_rng(slot).integers(1, SMOLLM_135M.vocab_size, PROMPT).tolist()
        for rows in calls(d.config, slot, ids[:-1]):
            state, _ = d.prefill((params,), state, *rows)
        state = d.insert(state, slot, request(d.config, ids, limit=LENGTH - 1, seed=slot))
    if guesses is not None:
        ahead = jnp.arange(guesses.shape[1]) >= PROMPT
        state = replace(state, text=jnp.where(ahead, jnp.asarray(guesses, jnp.int32), state.text))
    return state


def written(
    d: Decoder, params: Params, batch: int, guesses: Int[np.ndarray, "b n"] | None = None
) -> tuple[float, dict[int, list[int]]]:
    """Return the seconds that all texts take, and the texts."""
    state = jax.block_until_ready(begun(d, params, batch, guesses))
    began = time.perf_counter()
    _, output, ran = jax.block_until_ready(d.decode((params,), state, LENGTH))
    seconds = time.perf_counter() - began
    token, produced = (
        np.asarray(x)[: int(ran)].reshape(-1, d.config.num_slots) for x in (output.token, output.produced)
    )
    return seconds, {slot: token[produced[:, slot], slot].tolist() for slot in range(batch)}


def at_rates(batch: int, lengths: list[int], rates: list[float], rounds: int) -> list[dict[str, Any]]:
    """Return the ratio to plain decoding for every length of draft, one by acceptance too, and rate of right ones."""
    config, params = random_model(batch)
    plain = decoder(config)
    _, expected = written(plain, params, batch)
    texts = np.zeros((config.num_slots, PROMPT + LENGTH), np.int32)
    for slot, tokens in expected.items():
        texts[slot, PROMPT : PROMPT + len(tokens)] = tokens
    laws: list[tuple[str, int, DraftLength]] = [(str(length), length, FixedLength()) for length in lengths]
    laws.append(("by acceptance", max(lengths), by_acceptance(max(lengths), batch, config.batch)))
    found = []
    for name, most, law in laws:
        d = decoder(replace(config, draft=Drafting(most=most, length=law, drafter=told)))
        for rate in rates:
            guesses = wrong_at_random(texts, rate)
            if written(d, params, batch, guesses)[1] != expected:
                raise SystemExit(f"drafts of length {name} at rate {rate} changed a text")
            pairs = [(written(plain, params, batch)[0], written(d, params, batch, guesses)[0]) for _ in range(rounds)]
            ratio = statistics.median(before / after for before, after in pairs)
            found.append({"batch": batch, "rate": rate, "length": name, "ratio": ratio})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=arguments.count(), default=5)
    parser.add_argument(
        "--most", type=arguments.count(), default=8, help="drafted tokens of the bundled model (default 8)"
    )
    parser.add_argument("--part", choices=["prompts", "forced"], help="of the two parts, one alone (default both)")
    parser.add_argument("--batches", type=arguments.count(), nargs="+", default=[1, 4, 16])
    parser.add_argument("--lengths", type=arguments.count(), nargs="+", default=[1, 4, 12])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--folder", type=Path, default=RESULTS, help="for drafting.json and drafting_forced.json")
    args = parser.parse_args()
    if args.part != "forced":
        prompted = of_prompts(args.rounds, args.most)
        print(draft_tables.drafting(prompted))
        settings = {"rounds": args.rounds, "most": args.most, "tokens": TOKENS}
        write(args.folder / "drafting.json", "scripts/bench_drafting.py", settings, prompted=prompted)
    if args.part != "prompts":
        forced = [case for batch in args.batches for case in at_rates(batch, args.lengths, args.rates, args.rounds)]
        print(draft_tables.drafting_forced(forced))
        settings = {"rounds": args.rounds, "tokens": LENGTH - 1}
        write(args.folder / "drafting_forced.json", "scripts/bench_drafting.py", settings, forced=forced)


if __name__ == "__main__":
    main()
