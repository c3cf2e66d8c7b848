"""What caches lose that keep a part of their entries, and which policy chooses them best: at equal entries.

    python scripts/measure_compression.py --text novels.tar.xz

Rows of held-out text are read densely up to a point, at three quarters of the context. There every layer and KV head
keeps a share of its entries, and the rest of the row is read with those and with what came since. Told are the KL
divergence from the whole cache over that rest, with 95% intervals from resampling rows, and what each policy saves of
that of SnapKV, row by row. Where a policy has heads or layers keep different numbers, all must have room for the
largest: so it stands twice, at equal entries (what is read) and at equal room (what is held).

Then SnapKV, which ranks once the prompt is read, is compared with EntropyInfer's ranking by the queries of N_d tokens
decoded since: each holds as many entries over the tokens that are compared, which begin where the longest wait ends.

Then questions are asked whose answers stand in a long text: compressed once the question is read, as SnapKV has it,
and before it is, as any second question would find the cache. "h2o" and "oracle" are no policies of a decoder: the one
is given the queries of all tokens, the other those that are to come. Answers that go on for more than N_d tokens, the
first N_d of them taken as they come from the whole cache, say whether the queries of those know what is wanted next.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from et_jax.control.compression import Compression, named
from et_jax.control.policies import Policy
from et_jax.errors import UsageError
from et_jax.evidence import prompt_tables
from et_jax.evidence.compression_arms import HeavyHitters, Oracle, Way, read_on
from et_jax.serve.engine import Model, load
from et_jax.tasks.asking import counter
from et_jax.tasks.base import Example, right
from et_jax.tasks.generators import NUM_PAIRS, TASKS, document
from et_jax.text import Detokenizer
from scripts.measuring import arguments, paired
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write
from scripts.measuring.text import rows

SHARES = (0.5, 0.25, 0.125, 0.0625)
BASELINE = "snapkv"
WAITS = (0, 4, 16, 64)  # tokens decoded before a cache is compressed
ANSWER_WAITS = (4, 8)  # likewise, of an answer
PAGE_SIZE = 4
DISTANCES = (64, 256)  # tokens since the compression, at which a row is parted

Arms = dict[str, Callable[[int], Compression]]
"""A compression to so many entries, by its name."""


def arms() -> Arms:
    """Return what is compared."""

    def ranked(policy: Policy, budget: int) -> Compression:
        return Compression(budget=budget, gap=0, policy=policy)

    return {
        BASELINE: partial(named, BASELINE),
        "adakv": partial(named, "adakv"),
        "pyramidkv": partial(named, "pyramidkv"),
        "h2o": lambda budget: ranked(HeavyHitters(recent=budget // 2), budget),
        "streaming": partial(named, "streaming"),
        "random": partial(named, "random"),
        "oracle": partial(ranked, Oracle()),
    }


def check_context(model: Model) -> None:
    """Raise UsageError where the least share of a model's context is no more than the window that is always kept."""
    least = int((Compression.window + 1) / min(SHARES)) + 1
    if model.max_model_len < least:
        raise UsageError(f"{model.name} holds {model.max_model_len} tokens; take a model that holds at least {least}.")


def room(how: Compression, num_layers: int) -> int:
    """Return for how many entries every layer and KV head has room."""
    return how.layout(PAGE_SIZE, (None,) * num_layers).region * PAGE_SIZE


def fitting(make: Callable[[int], Compression], wanted: int, num_layers: int) -> Compression:
    """Return the compression of the most entries that has room for no more than so many."""
    least = Compression.window + PAGE_SIZE
    return next(how for budget in range(wanted, least, -PAGE_SIZE) if room(how := make(budget), num_layers) <= wanted)


@dataclasses.dataclass(frozen=True)
class Lost:
    """What a compression costs: nats of KL and of loss for every token compared, and the entries that it kept."""

    divergence: Float[np.ndarray, "r u"]
    loss: Float[np.ndarray, "r u"]
    entries: Int[np.ndarray, "r l k"]


class Bench:
    """One model's rows of text, compressed at three quarters of the context and read on."""

    def __init__(self, model: Model, text: Path, count: int) -> None:
        self.config, self.params = model.config, model.params
        self.tokens = rows(model, text, count, self.config.max_positions)
        self.length = self.tokens.shape[1]
        self.start = self.length * 3 // 4
        self.dense_loss = 0.0

    def way(self, how: Compression, wait: int = 0, ahead: int = 0) -> Way:
        """Return a compression so long after the start, which is compared from so many tokens after it on."""
        at = np.full(len(self.tokens), self.start + wait, np.int32)
        return Way(how=how, at=at, count=self.length - 1 - self.start - wait, judged=ahead - wait)

    def run(self, ways: dict[Any, Way]) -> dict[Any, Lost]:
        """Return what each way loses."""
        found: dict[Any, list[Lost]] = {name: [] for name in ways}
        dense_losses = []
        end = np.full(len(self.tokens), self.length, np.int32)
        for part, dense, read in read_on(self.config, self.params, self.tokens, end, ways, PAGE_SIZE):
            for name, got in read:
                first = self.length - 1 - ways[name].count + ways[name].judged
                true, following = dense.log_probs[:, first:-1], self.tokens[part, first + 1 :]
                losses = _compared(true, got.log_probs[:, ways[name].judged :], following)
                found[name].append(Lost(*jax.device_get((*losses, got.entries))))
            dense_losses.append(np.asarray(_compared(true, true, following)[1]))
        self.dense_loss = float(np.concatenate(dense_losses).mean())
        return {
            name: Lost(**{field: np.concatenate([getattr(one, field) for one in parts]) for field in vars(parts[0])})
            for name, parts in found.items()
        }


@jax.jit
def _compared(true: jax.Array, got: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The divergence from what is true, and the loss."""
    loss = -jnp.take_along_axis(got, following[..., None], axis=2)[..., 0]
    return jnp.sum(jnp.exp(true) * (true - got), axis=2), loss


def line(found: Lost, baseline: Lost) -> dict[str, Any]:
    """Return the figures of an arm."""
    by_row = found.divergence.mean(axis=1)
    parts = np.split(found.divergence, DISTANCES, axis=1)
    return {
        "entries": float(found.entries.mean()),
        "divergence": float(by_row.mean()),
        "divergence_interval": paired.interval(by_row),
        "divergence_by_distance": [float(part.mean()) for part in parts if part.size],
        "loss": float(found.loss.mean()),
        "saving": vars(paired.saving(by_row, baseline.divergence.mean(axis=1))),
    }


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Return a line per policy, share, and what is equal: the entries that are read, or those there is room for."""
    num_layers = bench.config.num_layers
    made: dict[tuple[str, str, float], Way] = {}
    for share in SHARES:
        budget = round(share * bench.start)
        for name, make in arms().items():
            how = make(budget)
            made["read", name, share] = bench.way(how)
            if how.policy.splits:
                made["held", name, share] = bench.way(fitting(make, budget, num_layers))
    found = bench.run(made)
    lines = []
    for (equal, name, share), way in made.items():
        entry = {"arm": name, "share": share, "equal": equal, "room": room(way.how, num_layers)}
        if entry["room"] >= bench.start:
            lines.append(entry | {"missed": "it has room for the whole cache, and leaves nothing out"})
        else:
            lines.append(entry | line(found[equal, name, share], found["read", BASELINE, share]))
        print(*lines[-1].values(), flush=True)
    return lines


def waits(bench: Bench) -> list[dict[str, Any]]:
    """Return a line per share and number of tokens decoded before the cache is compressed."""
    longest = max(WAITS)
    made = {
        (share, wait): bench.way(named("latent", round(share * bench.start) + wait, gap=wait), wait, longest)
        for share in SHARES
        for wait in WAITS
    }
    found = bench.run(made)
    lines = []
    for share, wait in made:
        entry = {"share": share, "waited": wait, "held": round(share * bench.start) + longest}
        lines.append(entry | line(found[share, wait], found[share, WAITS[0]]))
        print(*lines[-1].values(), flush=True)
    return lines


@dataclasses.dataclass(frozen=True)
class Question:
    """A question: its tokens, those of its answer, and how many stand before the question."""

    example: Example
    prompt: list[int]
    answer: list[int]
    before: int


def questions(model: Model, task: str, samples: int, num_pairs: int = NUM_PAIRS) -> list[Question]:
    """Return `samples` questions of a task at each of some depths, of the model's whole context."""
    count = counter(model)
    found: list[Question] = []
    for number, depth in enumerate(np.linspace(0, 1, DEPTHS)):
        for sample in range(samples):
            seed = number * samples + sample
            sizes = {"length": model.max_model_len, "num_pairs": num_pairs}
            made = document(task, count=count, depth=float(depth), seed=seed, **sizes)
            turn = made.turns[0]
            prompt = model.tokenizer.encode(made.context + turn.question)
            whole = model.tokenizer.encode(made.context + turn.question + turn.answer)
            example = Example(
                task=task, prompt=made.context + turn.question, answer=turn.answer, depth=turn.depth, length=len(whole)
            )
            before = len(prompt) - count(turn.question)
            found.append(Question(example=example, prompt=prompt, answer=whole[len(prompt) :], before=before))
    return found


def answered(model: Model, asked: Question, likeliest: Int[np.ndarray, " a"]) -> bool:
    """Return whether greedy decoding answers rightly, given the likeliest token after the prompt and each one after it.

    They are those of the right answer read on: greedy decoding writes it as long as each is the answer's next token.
    """
    detokenizer, text = Detokenizer(model.tokenizer), ""
    for token, wanted in zip(likeliest.tolist(), [*asked.answer, None], strict=False):
        text += detokenizer.push(token)
        if token != wanted:
            break
    return right(asked.example, text + detokenizer.flush())


Told = Callable[[Model, list[Question], Int[np.ndarray, "r t"]], list[Any]]


def answers(
    model: Model, asked: list[Question], ways: dict[Any, Way], told: Told | None = None
) -> tuple[list[Any], dict[Any, list[Any]]]:
    """Return which questions are answered rightly from the whole cache, and in each way.

    `told` says what is told of questions instead, from the likeliest tokens after every one.
    """
    told = told or right_answers
    ends = np.asarray([len(one.prompt) + len(one.answer) for one in asked], np.int32)
    tokens = np.zeros((len(asked), max(ends)), np.int32)
    for row, one, end in zip(tokens, asked, ends, strict=True):
        row[:end] = one.prompt + one.answer
    dense_right: list[Any] = []
    found: dict[Any, list[Any]] = {name: [] for name in ways}
    for part, dense, read in read_on(model.config, model.params, tokens, ends, ways, PAGE_SIZE):
        likeliest = np.asarray(jnp.argmax(dense.log_probs, axis=-1))
        dense_right += told(model, asked[part], likeliest)
        for name, got in read:
            after = np.asarray(jnp.argmax(got.log_probs, axis=-1))
            said = _continued(likeliest, after, ways[name].at[part])
            free = np.asarray([len(one.prompt) - 1 + ways[name].judged for one in asked[part]])
            said = np.where(np.arange(said.shape[1]) < free[:, None], likeliest, said)
            found[name] += told(model, asked[part], said)
    return dense_right, found


def ask(model: Model, samples: int) -> list[dict[str, Any]]:
    """Return right answers of every task by policy and share, compressed with the question read, and before."""
    lines: list[dict[str, Any]] = []
    for task in TASKS:
        asked = questions(model, task, samples)
        count = max(len(one.prompt) + len(one.answer) + 1 - one.before for one in asked)
        points = {
            "with the question": np.asarray([len(one.prompt) for one in asked], np.int32),
            "before the question": np.asarray([one.before for one in asked], np.int32),
        }
        made = {
            (point, name, share): Way(make(round(share * model.max_model_len)), at, count)
            for point, at in points.items()
            for name, make in arms().items()
            for share in SHARES
        }
        fits = {key for key, way in made.items() if room(way.how, model.config.num_layers) >= model.max_model_len}
        dense_right, found = answers(model, asked, {key: way for key, way in made.items() if key not in fits})
        for point, name, share in made:
            entry = {"task": task, "questions": len(asked), "dense": sum(dense_right), "compressed": point}
            entry |= {"arm": name, "share": share}
            if (point, name, share) in fits:
                entry["missed"] = "it has room for the whole cache, and leaves nothing out"
            else:
                told = found[point, name, share]
                entry |= {"right": sum(told), "p": paired.p_of_losses(dense_right, told)}
            lines.append(entry)
            print(*entry.values(), flush=True)
    return lines


def waiting(model: Model, asked: list[Question], wait: int, policies: Sequence[str]) -> dict[tuple[str, float], Way]:
    """Return the policies at the end of the question, and the latent one `wait` tokens on, by name and share.

    All hold as many entries from there on, and are judged from there on.
    """
    end = np.asarray([len(one.prompt) for one in asked], np.int32)
    count = max(len(one.answer) for one in asked) + 1
    made: dict[tuple[str, float], Way] = {}
    for share in SHARES:
        budget = round(share * model.max_model_len)
        for name in policies:
            made[name, share] = Way(named(name, budget), end, count, judged=wait)
        made["latent", share] = Way(named("latent", budget + wait, gap=wait), end + wait, count, judged=wait)
    return made


def rerank(model: Model, samples: int) -> list[dict[str, Any]]:
    """Return right ends of long answers, entries ranked by the prompt's queries and anew by those of the beginning.

    Both are judged from the same token on, hold as many entries there, and had the beginning from the whole cache.
    """
    lines: list[dict[str, Any]] = []
    for task in TASKS:
        whole = questions(model, task, samples)
        for wait in ANSWER_WAITS:
            asked = [one for one in whole if len(one.answer) > wait]
            if not asked:
                continue
            dense_right, found = answers(model, asked, waiting(model, asked, wait, (BASELINE,)))
            for (name, share), told in found.items():
                entry = {"task": task, "questions": len(asked), "dense": sum(dense_right), "waited": wait}
                lines.append(entry | {"arm": name, "share": share, "right": sum(told)})
                if name == "latent":
                    lines[-1]["p"] = paired.p_of_losses(told, found[BASELINE, share])
                print(*lines[-1].values(), flush=True)
    return lines


def _continued(
    dense: Int[np.ndarray, "r t"], after: Int[np.ndarray, "r u"], at: Int[np.ndarray, " r"]
) -> Int[np.ndarray, "r t"]:
    """The likeliest tokens, those from each row's point on as they come `after` it."""
    place = np.arange(dense.shape[1]) - at[:, None]
    later = np.take_along_axis(after, np.clip(place, 0, after.shape[1] - 1), axis=1)
    return np.where(place < 0, dense, later)


def right_answers(model: Model, asked: list[Question], likeliest: Int[np.ndarray, "r t"]) -> list[bool]:
    """Return which questions are answered rightly, by the likeliest token after every one of prompt and answer."""
    return [answered(model, one, row[len(one.prompt) - 1 :]) for one, row in zip(asked, likeliest, strict=True)]


def main() -> None:
    """Parse the arguments, measure, print tables and write them."""
    args = arguments.parser(__doc__, "model", "text", "rows", "samples", results="compression.json").parse_args()
    with arguments.refusals("measure_compression"):
        model = load(args.model, dtype="float32", max_num_seqs=2)
        check_context(model)
        bench = Bench(model, args.text, args.rows)
    found, waited, asked = measure(bench), waits(bench), ask(model, args.samples)
    ranked = rerank(model, args.samples)
    print(prompt_tables.compression(found, waited, asked, ranked))
    settings = {"model": args.model, "text": args.text.name, "rows": args.rows, "samples": args.samples}
    settings |= {"tokens": bench.length, "compressed_at": bench.start, "dense_loss": bench.dense_loss}
    settings |= {"window": Compression.window, "pooling": Compression.pooling, "block": PAGE_SIZE}
    results = {"policies": found, "waits": waited, "questions": asked, "reranked": ranked}
    write(args.output, "scripts/measure_compression.py", settings, **results)


if __name__ == "__main__":
    main()
