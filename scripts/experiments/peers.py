"""How many tokens a second do et_jax, its older version, llama.cpp and transformers get on one machine?

The model is random weights, by default in the shape of SmolLM-135M, rounded to bfloat16. Each engine has them in its
own forms, every form in a process of its own, and all take turns: greedy, end tokens ignored, the same prompts (token
ids), the same number of new tokens. et_jax runs what `Model.stream` runs, text and trace of every token included. That
all run one model is seen in float32, where their first greedy tokens must agree.
"""

import dataclasses
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from et_jax.errors import UsageError
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.shapes import SHAPES, random_folder
from scripts.measuring.timing import Round
from scripts.peers import Engine

FORMS = {
    "et_jax": ("bfloat16", "int8"),
    "et_jax before": ("bfloat16",),
    "llama.cpp": ("bfloat16", "Q8_0"),
    "transformers": ("bfloat16", "float32"),
}
PAUSE = 0.3  # seconds between turns, in which the threads of the engine that ran go to sleep
AGREEING = 16  # tokens of each of two prompts that are compared in float32


class Settings(Base):
    """Flags of the experiment."""

    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    rounds: int = setting(7, "rounds in which all take turns", least=2, quick=2)
    checkout: str = experiment.checkout()
    control: str = setting("off", "the preset that et_jax decodes under, in both versions")
    llama_python: str = setting("", "a Python with llama-cpp-python; none to leave llama.cpp out")
    transformers_python: str = setting("", "a Python with torch and transformers; none to leave them out")
    batches: tuple[int, ...] = setting((1, 4, 16), "sequences at once", least=1, quick=(1,))
    tokens: int = setting(64, "new ones of each sequence", least=2, quick=2)
    prompt_tokens: int = setting(32, "tokens of each prompt", least=1, quick=2)


def drawn(batch: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [draw.choices(range(SHAPES["small"].vocab_size), k=length) for _ in range(batch)]


def check_agreement(engines: dict[str, Engine], model: str, prompt_tokens: int) -> None:
    """Print how many greedy tokens of et_jax's each peer gives in float32, from the start of two texts on.

    Raises UsageError where the first differs: that engine does not run the same model.
    """
    prompts, ids = drawn(2, prompt_tokens, 0), {}
    for name, engine in engines.items():
        engine.load(model, "float32", 2, prompt_tokens + AGREEING)
        ids[name] = engine.generate(prompts, AGREEING)["ids"]
    ours = ids.pop("et_jax")
    for name, theirs in ids.items():
        equal = [sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(*each))) for each in zip(ours, theirs)]  # noqa: B905
        print(f"{name}: {equal} of {AGREEING} tokens are et_jax's in float32", file=sys.stderr)
        if min(equal) == 0:
            raise UsageError(f"{name} gives another first token in float32: it does not run the same model.")


def started(engine: Engine, given: tuple[str, str, int], settings: Settings) -> Round:
    """Return a round of an engine with a model in a form and for a batch; each round has prompts of its own."""
    tokens, seeds = settings.tokens, itertools.count()
    how = {"control": settings.control} if engine.engine == "et_jax" else {}
    engine.load(*given, settings.prompt_tokens + tokens, **how)

    def timed() -> dict[str, float]:
        time.sleep(PAUSE)
        found = engine.generate(drawn(given[2], settings.prompt_tokens, next(seeds)), tokens)
        rate, steps = given[2] * tokens / found["seconds"], (tokens - 1) / (found["seconds"] - found["first"])
        return {"tokens_per_second": rate, "steps_per_second": steps, "first_seconds": found["first"]}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each batch."""
    makers = {"et_jax": partial(Engine, "et_jax", sys.executable, PYTHONPATH=str(REPOSITORY))}
    if settings.checkout:
        before = str(Path(settings.checkout).resolve())
        makers["et_jax before"] = partial(Engine, "et_jax", sys.executable, PYTHONPATH=before)
    for name, python in (("llama.cpp", settings.llama_python), ("transformers", settings.transformers_python)):
        if python:
            makers[name] = partial(Engine, name, python)
    shape = SHAPES[settings.shape]
    layers = settings.layers or shape.num_layers
    shape = dataclasses.replace(shape, num_layers=layers, windows=(None,) * layers, max_positions=2048)
    with tempfile.TemporaryDirectory() as folder:
        model = str(random_folder(Path(folder), shape, "bfloat16"))
        engines = {(name, form): make() for name, make in makers.items() for form in FORMS[name]}
        firsts = {name: engines[name, FORMS[name][0]] for name in makers}
        print({name: engine.versions for name, engine in firsts.items()}, file=sys.stderr)
        check_agreement(firsts, model, settings.prompt_tokens)
        for batch in settings.batches:
            arms = {
                f"{name}, {form}": partial(started, engine, (model, form, batch), settings)
                for (name, form), engine in engines.items()
            }
            yield Group(labels={"batch": batch}, arms=arms, baseline="et_jax, bfloat16", rounds=settings.rounds)
        for engine in engines.values():
            engine.end()


FIGURES = {
    "tokens_per_second": Figure(header="tokens a second", against="ratio"),
    "steps_per_second": Figure(header="steps a second"),
    "first_seconds": Figure(header="seconds to the first token"),
}
