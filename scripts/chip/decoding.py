"""Steps of `decode` after caches of random tokens, for the cases of one size: weights are drawn once.

Of the keys one in 256 is 24 times as long as the others, so that few blocks have most of the mass. A random model is
never certain, so a preset that chooses by a tolerance is given a constant one: the tolerance is searched for by which
6 to 10% of the blocks are read, on the chip itself, for it depends on the shape and on the preset's laws.
"""

import dataclasses
import gc
import glob
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.draft import FixedLength
from et_jax.control.presets import preset
from et_jax.control.priority import EntropyDrift
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.decode.output import unpacked_steps
from et_jax.decode.state import DecodeState
from et_jax.models.params import in_stacks
from et_jax.models.stacks import stacked_on
from et_jax.models.transformer import initialise
from et_jax.pallas.backend import pick
from et_jax.types import replace
from scripts.chip.cases import CHOOSING, PAGE_SIZE, QUEST, ROOM, SELF, Case, Settings
from scripts.measuring import paired
from scripts.measuring.selectors import guarded, quest
from scripts.measuring.shapes import SHAPES, even_heads
from scripts.measuring.states import filled, with_random_pages
from scripts.measuring.timing import seconds

TOLERANCES = {"paper": 0.05, "certified": 0.9, "adaptive": 0.1}  # where the search begins
OUTSTANDING, LONGER = 1 / 256, 24.0
READ, WITHIN = (
    0.08,
    0.25,
)  # the share of the blocks that is searched for, and by what part of it that may differ, if one can be had
TRIED = 3  # steps under each tolerance, of which the last counts
COMPILERS = 4  # at once


def controller(name: str) -> Controller:
    """Return a way of choosing at a constant tolerance; Quest reads a share of the blocks."""
    if name in ("off", SELF):
        return preset("off")
    chosen = guarded(quest) if name == "quest" else preset(name, min_context=0)
    tolerance = Constant(TOLERANCES.get(name, QUEST))
    return replace(chosen, law=chain(EmaEntropy(), FallClock(), tolerance, EntropyDrift()))


def configuration(case: Case, settings: Settings) -> DecoderConfig:
    """Return the decoder of a case, with room for the tokens that it will write."""
    drafted = 0 if case.control != SELF else settings.drafted
    room = -(-ROOM * (1 + drafted) // PAGE_SIZE) * PAGE_SIZE
    positions = -(-case.tokens // PAGE_SIZE) * PAGE_SIZE + room
    model = dataclasses.replace(SHAPES[case.shape], max_positions=positions)
    slots = max(2, case.rows)
    return DecoderConfig(
        model=model,
        num_slots=slots,
        batch=slots,
        page_size=PAGE_SIZE,
        num_pages=slots * positions // PAGE_SIZE + 1,
        max_length=positions,
        prefill_batch=PAGE_SIZE,
        chunk=PAGE_SIZE,
        max_steps=settings.steps,
        cache_dtype="bfloat16",
        backend=pick(jax.default_backend()),
        calibration=even_heads(model),
        controller=controller(case.control),
        draft=Drafting(most=drafted, length=FixedLength(), drafter=Pruned()) if drafted else None,
    )


def measured(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what is found of each case, in order.

    All programs are compiled before the first is timed, several at once: a compiler tries products on the chip.
    """
    configs = [configuration(case, settings) for case in cases]
    model = configs[0].model
    weights = initialise(model, jax.random.key(settings.seed), jnp.bfloat16)
    if stacked_on(jax.default_backend()):
        weights = in_stacks(weights, model, lambda *each: jnp.stack(each)) or weights
    jax.block_until_ready(weights)
    gc.collect()
    with ThreadPoolExecutor(COMPILERS) as pool:
        made = [pool.submit(programs, case, config, (weights,)) for case, config in zip(cases, configs, strict=True)]
    for case, config, compiled in zip(cases, configs, made, strict=True):
        yield one(case, config, settings, *compiled.result())
        gc.collect()


def programs(case: Case, config: DecoderConfig, weights: Any) -> tuple[Callable[[], DecodeState], Callable[..., Any]]:
    """Return the compiled programs of a case: one makes its state, the other runs steps."""

    def begun() -> DecodeState:
        state = with_random_pages(config, filled(config, case.tokens), OUTSTANDING, LONGER)
        return replace(state, active=jnp.arange(config.num_slots) < case.rows)

    lowered = jax.jit(begun).lower()
    decoding = decoder(config).variants[config.full_variant].lower(weights, lowered.out_info, jnp.int32(1))
    return lowered.compile(), partial(decoding.compile(), weights)


def one(
    case: Case, config: DecoderConfig, settings: Settings, begin: Callable[[], DecodeState], decode: Callable[..., Any]
) -> dict[str, Any]:
    """Return the figures of a case: the milliseconds of a step in each round, and what it read."""
    held: list[Any] = [begin(), None]

    def steps(count: int) -> Any:
        held[:] = decode(held[0], jnp.int32(count))
        return held[1].words

    def share(first: int) -> float:
        """Of the blocks, what was read by the steps from the first on."""
        output, ran = unpacked_steps(held[1])
        signals = output.signals
        read, pages = (float(jnp.sum(one[first:ran])) for one in (signals.blocks_read, signals.allocated_pages))
        return read / max(1.0, pages) / (config.model.num_layers * config.model.num_kv_heads)

    def at(tolerance: float) -> tuple[float, None]:
        control = held[0].control
        control = replace(control, tolerance=jnp.full_like(control.tolerance, tolerance))
        held[0] = replace(held[0], control=control)
        steps(TRIED)
        return share(TRIED - 1), None

    jax.block_until_ready(steps(1))
    found: dict[str, Any] = {}
    if case.control in CHOOSING:
        start = TOLERANCES[case.control]
        found["tolerance"], _ = paired.matched(at, READ, 1e-9, 1e6, within=WITHIN, start=start, or_nearest=True)
    rounds, shares = [], []
    for _ in range(settings.rounds):
        took = seconds(lambda: (steps(settings.steps), held[0]))
        rounds.append(1e3 * took / int(unpacked_steps(held[1])[1]))
        shares.append(share(0))  # some presets read everything now and then
    found |= {"milliseconds": rounds, "share_read": statistics.mean(shares)}
    if case.control == SELF:
        output, ran = unpacked_steps(held[1])
        found["tokens_per_step"] = float(jnp.sum(output.produced)) / (int(ran) * case.rows)
    if settings.profile and (counted := kernels(lambda count: jax.block_until_ready((steps(count), held[0])))):
        found["kernels"] = counted
    return found


def kernels(run: Callable[[int], Any]) -> float | None:
    """Return how many kernels and copies the chip runs in a step, None where the profile has no GPU.

    What a call begins and ends with is left out, as the difference of a call of five steps and of one.
    """
    counts = []
    for steps in (1, 5):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run(steps)
            [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            planes = jax.profiler.ProfileData.from_file(path).planes
            lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines]
            counts.append(sum(1 for line in lines if "Stream" in line.name for _ in line.events))
    return (counts[1] - counts[0]) / 4 if counts[0] else None
