"""Texts walked along by a verifier, whose drafts are as long as a law says: what each takes, and what stops save.

The model writes texts; those that run in a circle are left out, and counted. A drafted token holds where the drafter's
sample, by the same noise, is the text's token. Drafts are as long as a law says: a fixed number of tokens; the laws of
`et_jax.control.draft`; or until the drafter's own entropy passes a bound, that token still drafted (SVIP, Zhang et al.
2024), or its sum over the draft does. Each stop gets the bound at which as many tokens are drafted as by another law.
Controls, as many drafted again: the entropies shuffled within each text, and the same chance of a stop everywhere.
Tokens drafted behind a rejected one count, but their entropies are those of the text's own positions, where a drafter
would have gone on from its wrong token. With c the time of a drafter's step over the model's and r that of a verified
row, a text takes

    steps + (c + r) drafted

of the model's steps. Savings are of that time, with 95% intervals over texts.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from et_jax.control.draft import MOST_DRAFTED, AcceptanceLength, DraftLength, EntropyLength, started, updated
from et_jax.control.entropy import entropy, moments
from et_jax.errors import UsageError
from et_jax.evidence.coupling import keys, sampled
from et_jax.serve.engine import Model
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.measuring import paired
from scripts.measuring.text import held_out_logits, in_a_circle

COSTS = (0.05, 0.1, 0.25)  # of a drafter's step, over the model's
ROW_COST = 0.05  # of a verified row
FIXED = tuple(range(1, 13))
MATCHED = (2, 4, 8)  # fixed lengths whose drafted tokens the stops are given
SHUFFLES = 5
HALVINGS = 20  # of the stretch in which a bound is searched
CIRCLE = 50  # tokens: the longest run that a text in a circle repeats

Choose = Callable[[int, int, int], int]
"""From the tokens written, and how many were drafted and accepted last, to the length of the next draft."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Texts of the model: which tokens its drafter would have sampled too, and what each model's entropy was there.

    `told` is the model's, as laws of lengths hear it; `entropy` the drafter's; both raw, in nats. `reproduced` is the
    share of tokens that the model samples again when it reads the texts; `circles` were left out.
    """

    hits: Bool[np.ndarray, "r n"]
    told: Float[np.ndarray, "r n"]
    entropy: Float[np.ndarray, "r n"]
    reproduced: float
    circles: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """What each text took: steps of the model, tokens drafted and tokens accepted."""

    steps: Float[np.ndarray, " r"]
    drafted: Float[np.ndarray, " r"]
    accepted: Float[np.ndarray, " r"]

    def time(self, cost: float) -> Float[np.ndarray, " r"]:
        """Return each text's time in steps of the model, a drafter's step at `cost` of one."""
        return self.steps + (cost + ROW_COST) * self.drafted


def written(model: Model, drafter: Model, prompts: Int[np.ndarray, "r t"], temperature: float) -> Written:
    """Return what the model writes after the prompts, as many tokens as those have, and where drafts would hold."""
    asked = [
        GenerationRequest(
            prompt=prompt.tolist(),
            params=SamplingParams(max_tokens=len(prompt), temperature=temperature, ignore_eos=True, seed=seed),
        )
        for seed, prompt in enumerate(prompts)
    ]
    completions = model.generate(asked)
    kept = np.array([i for i, c in enumerate(completions) if not in_a_circle(c.token_ids, CIRCLE)], np.int32)
    if len(kept) < 2:
        raise UsageError(f"Of {len(prompts)} texts {len(kept)} run in no circle, too few to compare; ask for more.")
    tokens = np.array([completions[i].token_ids for i in kept], np.int32)
    whole = np.concatenate([prompts[kept], tokens], axis=1)
    length = tokens.shape[1]
    position = jnp.tile(jnp.arange(length, 2 * length, dtype=jnp.int32), len(kept))
    key = keys(np.repeat(kept, length))
    again, guess = (held_out_logits(each, whole)[0] for each in (model, drafter))
    same, hits = (
        np.asarray(sampled(logits, jnp.float32(temperature), key, position)).reshape(tokens.shape) == tokens
        for logits in (again, guess)
    )
    return Written(
        hits=hits,
        told=np.array([[row.entropy for row in completions[i].trace] for i in kept]),
        entropy=np.asarray(entropy(moments(guess)), np.float64).reshape(tokens.shape),
        reproduced=float(same.mean()),
        circles=len(prompts) - len(kept),
    )


def walk(hits: Bool[np.ndarray, " n"], choose: Choose) -> tuple[int, int, int]:
    """Return the steps, the drafted and the accepted tokens of one text.

    A step brings the drafted tokens that hold, up to the first that does not, and one token of the model's own.
    """
    at = steps = drafted = accepted = length = held = 0
    while at < len(hits):
        length = min(choose(at, length, held), len(hits) - at - 1)
        held = next((ahead for ahead in range(length) if not hits[at + ahead]), length)
        at, steps, drafted, accepted = at + held + 1, steps + 1, drafted + length, accepted + held
    return steps, drafted, accepted


def walked(hits: Bool[np.ndarray, "r n"], choosers: Iterator[Choose]) -> Costs:
    """Return what every text took, each with its own chooser of lengths."""
    found = [walk(*each) for each in zip(hits, choosers, strict=True)]
    return Costs(*np.array(found, np.float64).T)


def by_law(law: DraftLength, most: int, told: Float[np.ndarray, " n"]) -> Choose:
    """Return the lengths of a law of the engine, told of every draft what the engine would tell it."""
    state = started(law, jnp.int32(most))

    def choose(at: int, drafted: int, accepted: int) -> int:
        nonlocal state
        if at:
            newest, counts = jnp.float32(told[at - 1]), [jnp.int32(x) for x in (drafted, accepted)]
            state = _updated(law, state, jnp.bool_(True), *counts, newest, jnp.int32(at))
        return int(state.length)

    return choose


_updated = jax.jit(updated)


def by_stop(signal: Float[np.ndarray, "n m"], bound: float) -> Choose:
    """Return lengths up to the first drafted token whose signal passes the bound, that one too, or all `m`."""
    passes = signal > bound
    length = np.where(passes.any(axis=1), passes.argmax(axis=1) + 1, signal.shape[1])
    return lambda at, *_: int(length[at])


def ahead(signal: Float[np.ndarray, "r n"]) -> Float[np.ndarray, "r n m"]:
    """Return what a draft from each position on meets, as many tokens as may be drafted."""
    padded = np.pad(signal, ((0, 0), (0, MOST_DRAFTED - 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, MOST_DRAFTED, axis=1)


SIGNALS = {"entropy": ahead, "summed entropy": lambda entropy: ahead(entropy).cumsum(axis=-1)}


def stopped(hits: Bool[np.ndarray, "r n"], signal: Float[np.ndarray, "r n m"], bound: float) -> Costs:
    """Return what every text takes where drafts stop as the signal passes the bound."""
    return walked(hits, (by_stop(row, bound) for row in signal))


def as_many(hits: Bool[np.ndarray, "r n"], signal: Float[np.ndarray, "r n m"], budget: float) -> tuple[float, Costs]:
    """Return the bound at which `budget` tokens are drafted for every token of the texts, and what they take.

    No bound drafts exactly so many: two are mixed that lie side by side. Raises ValueError where no bound comes near.
    """

    def at(bound: float) -> tuple[float, Costs, float]:
        found = stopped(hits, signal, bound)
        return bound, found, float(found.drafted.sum()) / hits.size

    low, high = at(-1.0), at(float(signal.max()))  # one token a draft, and all
    if not low[2] <= budget <= high[2]:
        raise ValueError(
            f"{budget:.3f} drafted tokens a token were asked for; stops draft {low[2]:.3f} to {high[2]:.3f}"
        )
    for _ in range(HALVINGS):
        middle = at((low[0] + high[0]) / 2)
        low, high = (middle, high) if middle[2] <= budget else (low, middle)
    share = (budget - low[2]) / (high[2] - low[2]) if high[2] > low[2] else 0.0
    few, many = (dataclasses.astuple(found) for _, found, _ in (low, high))
    return low[0], Costs(*((1.0 - share) * x + share * y for x, y in zip(few, many, strict=True)))


def mean(each: list[Costs]) -> Costs:
    """Return the mean over runs of what every text took."""
    return Costs(*np.mean([dataclasses.astuple(one) for one in each], axis=0))


def lengths(texts: Written, rng: np.random.Generator) -> dict[str, Any]:
    """Return a line for every law, and what stops by entropy save of the time of others that draft as much."""
    hits = texts.hits
    num_texts, n = hits.shape

    def law(rule: DraftLength, most: int) -> Costs:
        return walked(hits, (by_law(rule, most, told) for told in texts.told))

    spent = {f"fixed {k}": walked(hits, (lambda *_, k=k: k for _ in hits)) for k in FIXED}
    spent |= {f"the model's entropy, {k} or none": law(EntropyLength(), k) for k in MATCHED}
    spent |= {f"acceptance, for c {c:g}": law(AcceptanceLength(c + ROW_COST), MOST_DRAFTED) for c in COSTS}
    published = float(EntropyLength().bound)
    spent[f"stop by entropy, {published:g} nats"] = stopped(hits, ahead(texts.entropy), published)
    lines, controls, comparisons = [_line(name, found) for name, found in spent.items()], [], []
    for name in (*(f"fixed {k}" for k in MATCHED), "acceptance, for c 0.1"):
        budget = float(spent[name].drafted.sum()) / hits.size
        shuffles = [rng.permuted(texts.entropy, axis=1) for _ in range(SHUFFLES)]
        coins = [rng.random((num_texts, n, MOST_DRAFTED)) for _ in range(SHUFFLES)]
        try:
            even = mean([as_many(hits, each, budget)[1] for each in coins])
            savings = []
            for kind, signal in SIGNALS.items():
                bound, stops = as_many(hits, signal(texts.entropy), budget)
                shuffled = mean([as_many(hits, signal(each), budget)[1] for each in shuffles])
                lines.append(_line(f"stop by {kind}, as {name}", stops) | {"bound": bound})
                controls.append(_line(f"stop by {kind} shuffled, as {name}", shuffled))
                for against, other in ((name, spent[name]), ("shuffled", shuffled), ("even chance", even)):
                    times = {f"{c:g}": paired.saving(stops.time(c), other.time(c)) for c in COSTS}
                    times = {c: dataclasses.asdict(saving) for c, saving in times.items()}
                    savings.append({"stop": kind, "against": against, "times": times})
            controls.append(_line(f"stop by even chance, as {name}", even))
        except ValueError as error:
            comparisons.append({"budget": name, "missed": str(error)})
            continue
        comparisons.append({"budget": name, "drafted_per_token": budget, "savings": savings})
    about = {"texts": num_texts, "tokens": n, "circles": texts.circles, "reproduced": texts.reproduced}
    return about | {"laws": lines, "controls": controls, "comparisons": comparisons}


def _line(name: str, spent: Costs) -> dict[str, Any]:
    steps, drafted, accepted = (float(x.sum()) for x in (spent.steps, spent.drafted, spent.accepted))
    return {
        "law": name,
        "tokens_per_step": (steps + accepted) / steps,
        "drafted_per_token": drafted / (steps + accepted),
        "accepted": accepted / max(drafted, 1.0),
        "speed": {f"{c:g}": (steps + accepted) / float(spent.time(c).sum()) for c in COSTS},
    }
