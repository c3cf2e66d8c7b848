"""The training loop: optimizer, atomic checkpoints, progress, the deadline."""

import collections
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from et_jax.errors import UsageError
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.training import corpus, loss, probe
from et_jax.training.distillation import Teacher, agreement, projected
from et_jax.training.mixture import Batch, mixed_rows
from et_jax.training.settings import Settings
from et_jax.types import pytree

MARKS = 11  # reports over which the pace is averaged to plan the end


@pytree
class TrainState:
    """Stacked weights and the optimizer's memory, float32."""

    params: Params
    optimizer: Any


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return gradient clipping, then Muon on the layers' matrices and AdamW on the rest, at peak rates."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)

    def dimensions(params: Params) -> Any:
        return jax.tree.map(lambda leaf: matrix if leaf.ndim > 2 else None, params)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.contrib.muon(
            settings.matrix_rate,
            weight_decay=settings.weight_decay,
            adam_weight_decay=settings.weight_decay,
            adam_learning_rate=settings.other_rate,
            adam_b2=0.98,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


@functools.partial(jax.jit, static_argnames="settings")
def initial_state(settings: Settings) -> TrainState:
    """Return random weights drawn from the seed and an empty optimizer memory."""
    params = loss.stack(initialise(settings.model, jax.random.key(settings.seed)), settings.model)
    return TrainState(params=params, optimizer=optimizer(settings).init(params))


def start_beside(teacher: Teacher, settings: Settings) -> tuple[TrainState, int]:
    """Return the start of a student: random layers, an embedding derived from its teacher's, after no steps."""
    params = projected(initial_state(settings).params, teacher)
    return TrainState(params=params, optimizer=optimizer(settings).init(params)), 0


def start_from(params: Params, settings: Settings) -> tuple[TrainState, int]:
    """Return a start from the weights of a model, with an empty optimizer memory, after no steps."""
    stacked = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loss.stack(params, settings.model))
    return TrainState(params=stacked, optimizer=optimizer(settings).init(stacked)), 0


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def train_step(
    state: TrainState,
    settings: Settings,
    inputs: Int[Array, "b t"],
    targets: Int[Array, "b t"],
    factor: Float[Array, ""],
    weights: Float[Array, "b t"] | None = None,
    segments: Int[Array, "b t"] | None = None,
    teacher: Teacher | None = None,
) -> tuple[TrainState, Float[Array, ""]]:
    """Return the state after one step at `factor` of the peak rates, and the loss before it, nats per token.

    With a teacher the loss is the divergence from it.
    """

    def value_of(params: Params) -> Float[Array, ""]:
        if teacher is None:
            return loss.mean_loss(params, settings.model, inputs, targets, weights, segments)
        taught = teacher.params, teacher.config
        return loss.mean_divergence(params, settings.model, inputs, *taught, weights, segments)

    value, gradients = jax.value_and_grad(value_of)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of its integer step count
        updates, memory = optimizer(settings).update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda leaf, update: leaf + factor * update, state.params, updates)
    return TrainState(params=params, optimizer=memory), value


def evaluate(params: Params, settings: Settings, rows: corpus.Rows, batch_tokens: int = 8192) -> np.ndarray:
    """Return -log p of every target of `rows`, nats, zero outside the mask."""
    size = max(1, batch_tokens // rows.inputs.shape[1])
    parts = []
    for begin in range(0, len(rows.inputs), size):
        inputs, targets = (np.pad(y, ((0, max(0, begin + size - len(y))), (0, 0))) for y in (rows.inputs, rows.targets))
        parts.append(
            loss.token_losses(params, settings.model, inputs[begin : begin + size], targets[begin : begin + size])
        )
    losses = np.concatenate([np.asarray(part) for part in parts])[: len(rows.inputs)]
    return np.where(rows.target_mask, losses, 0.0)


def train(
    settings: Settings,
    train_tokens: corpus.Tokens,
    held_out: corpus.Tokens,
    folder: Path,
    steps: int | None,
    minutes: float | None,
    *,
    tokenizer: Tokenizer | None = None,
    start: tuple[TrainState, int] | None = None,
    teacher: Teacher | None = None,
) -> int:
    """Train to the end, or until SIGTERM, from the last checkpoint in `folder`; return the steps done.

    Without a checkpoint it begins with `start`, a state and its number of steps, or from random weights.
    The tasks of a mixture need the `tokenizer` that made the tokens, and settings of a student its `teacher`.
    With `steps` the run is reproducible; with `minutes` of wall time the number of steps is planned while
    the learning rate is still constant, written to the log and to the checkpoints, and reproduces the run.
    """
    if (steps is None) == (minutes is None):
        raise UsageError("Give either --steps or --minutes, so that the training knows when to end.")
    if settings.mixture is not None and tokenizer is None:
        raise UsageError("A mixture with tasks needs the tokenizer that made the tokens; give it to train.")
    if settings.distilled != (teacher is not None):
        raise UsageError("Settings of a student need a teacher, and no others have one; give both or neither.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pid").write_text(f"{os.getpid()}\n")
    started, schedule = time.monotonic(), settings.schedule
    with _manager(folder) as manager, (folder / "log.jsonl").open("a") as log, _progress() as bar, _asked() as asked:
        state, step, planned = _resume(manager, settings, start)
        steps = steps or planned
        task, recent, marks = bar.add_task("training"), [], collections.deque([(step, started)], maxlen=MARKS)
        while not asked and (steps is None or step < steps):
            length, factor = schedule.length(step, steps), schedule.factor(step, steps)
            rows = _rows(settings, train_tokens, tokenizer, step, length)
            state, value = train_step(
                state, settings, rows.inputs, rows.targets, np.float32(factor), rows.weights, rows.segments, teacher
            )
            recent.append(float(value))  # waits for the step, so that clocks and signals see only finished ones
            step += 1
            last = step == steps
            bar.update(task, completed=step, total=steps)
            if step % settings.report_every == 0 or last:
                record = {"step": step, "of": steps, "loss": float(np.mean(recent)), "factor": factor, "length": length}
                recent, now = [], time.monotonic()
                marks.append((step, now))
                seconds = (now - marks[-2][1]) / (step - marks[-2][0])
                record["tokens_per_second"] = settings.windows_per_step * settings.window / seconds
                record["minutes"] = (now - started) / 60
                if step % settings.evaluate_every == 0 or last:
                    record |= _held_out_figures(state.params, settings, held_out, length, teacher)
                    if settings.mixture is not None and tokenizer is not None:
                        record |= _task_figures(state.params, settings, held_out, tokenizer, length)
                _report(log, bar, record)
                if steps is None and minutes is not None:
                    pace = (now - marks[0][1]) / (step - marks[0][0])
                    steps = schedule.planned(step, pace, minutes * 60 - (now - started))
            if step % settings.save_every == 0 or last or asked:
                _save(manager, state, step, steps)
    return step


@contextlib.contextmanager
def _asked() -> Iterator[list[int]]:
    """Yield a list that becomes non-empty once SIGTERM has requested the end."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _rows(settings: Settings, tokens: corpus.Tokens, tokenizer: Tokenizer | None, step: int, length: int) -> Batch:
    order = {"seed": settings.seed, "step": step, "num_windows": settings.windows_per_step, "length": length}
    if settings.mixture is not None and tokenizer is not None:
        return mixed_rows(settings.mixture, tokens, tokenizer, **order, window=settings.window)
    rows = corpus.training_rows(tokens, **order, window=settings.window)
    return Batch(inputs=rows.inputs, targets=rows.targets)


def _held_out_figures(
    params: Params, settings: Settings, held_out: corpus.Tokens, length: int, teacher: Teacher | None
) -> dict[str, float]:
    """Return the mean loss, and the agreement with a teacher, on rows spread evenly over the held-out works."""
    length = settings.evaluated_length or length
    rows = corpus.spread(corpus.held_out_rows(held_out, length), max(1, settings.evaluated_tokens // length))
    nats = float(evaluate(params, settings, rows).sum() / rows.target_mask.sum())
    figures = {"held_out_per_token": nats, "held_out_per_byte": nats * len(held_out.ids) / held_out.num_bytes}
    if teacher is None:
        return figures
    found = vars(agreement(params, settings, teacher, rows))
    return figures | {name: float(values.sum() / rows.target_mask.sum()) for name, values in found.items()}


def _task_figures(
    params: Params, settings: Settings, held_out: corpus.Tokens, tokenizer: Tokenizer, length: int
) -> dict[str, float]:
    """Return the share of right answers of every task."""
    length = min(length, settings.probed_length)
    given = probe.probe(tokenizer, held_out, length, settings.probed_rows, settings.probed_pairs)
    return {f"accuracy/{task}": share for task, share in probe.accuracy(params, settings, given).items()}


def _manager(folder: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        (folder / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
    )


def _save(manager: ocp.CheckpointManager, state: TrainState, step: int, steps: int | None) -> None:
    """Write a checkpoint under a temporary name, renamed when complete."""
    if step in manager.all_steps():
        return
    leaves = ocp.args.StandardSave(jax.tree.leaves(state))  # type: ignore[call-arg]
    manager.save(step, args=ocp.args.Composite(state=leaves, plan=ocp.args.JsonSave({"steps": steps})))  # type: ignore[call-arg]


def _resume(
    manager: ocp.CheckpointManager, settings: Settings, start: tuple[TrainState, int] | None = None
) -> tuple[TrainState, int, int | None]:
    """Return the last checkpoint's state, steps done and planned number of steps, or `start`, or a new start."""
    state, done = start or (initial_state(settings), 0)
    step = manager.latest_step()
    if step is None:
        return state, done, None
    leaves, treedef = jax.tree.flatten(state)
    wanted = ocp.args.StandardRestore(leaves)  # type: ignore[call-arg]
    found = manager.restore(step, args=ocp.args.Composite(state=wanted, plan=ocp.args.JsonRestore()))  # type: ignore[call-arg]
    return treedef.unflatten(found["state"]), step, found["plan"]["steps"]


def load_state(folder: Path, settings: Settings) -> tuple[TrainState, int]:
    """Return the state of the last checkpoint in `folder` and its step."""
    with _manager(folder) as manager:
        if manager.latest_step() is None:
            raise UsageError(f"{folder} holds no checkpoint yet; train first, or name the folder of a run.")
        state, step, _ = _resume(manager, settings)
    return state, step


def load_params(folder: Path, settings: Settings) -> tuple[Params, int]:
    """Return the stacked weights of the last checkpoint in `folder` and its step."""
    state, step = load_state(folder, settings)
    return state.params, step


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, transient=True)


def _report(log: TextIO, bar: Progress, record: dict[str, Any]) -> None:
    """Print a line for people and write one for programs."""
    log.write(json.dumps(record) + "\n")
    log.flush()
    words = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()]
    bar.console.print(", ".join(words), soft_wrap=True, highlight=False)
