"""A model on given text by the decoder's own step: what reading less or forgetting does to predictions.

Rows are read as prompts up to `start`; the tokens after it pass one by one, each followed by the row's true next one,
under any controller, and with any compression of the cache. So what a step changes in later keys and values counts. The
same tokens decoded by the dense model stand beside.
"""

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.control.compression import Compression
from et_jax.control.controller import Controller
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decoder, in_float32
from et_jax.decode.plant import costs
from et_jax.decode.state import DecodeState, empty, fresh_control, slot_laws
from et_jax.decode.step import step
from et_jax.models.calibration import Calibration
from et_jax.scope import own_settings
from et_jax.serve.engine import Model, load
from et_jax.types import pytree, replace
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, setting
from scripts.measuring.selectors import guarded, true_mass
from scripts.measuring.states import prefilled

DENSE = Controller()
FIGURES = {
    "share_read": Figure(header="blocks read"),
    "divergence": Figure(header="KL from dense, nats", against="saving"),
    "loss": Figure(header="loss, nats"),
    "agrees": Figure(header="same likeliest token"),
}
"""What experiments show of scores."""


@pytree
class Scores:
    """What a controller gave at every measured token, "r m".

    `divergence` is KL from the dense model, `loss` that of the true next token, both in nats. `agrees` says whether the
    likeliest token is the dense model's. `share_read` is of the blocks that all tokens fill; `share_bytes` adds what
    was read to choose, and is over the bytes of all their keys and values. `kept` are fields of the control state after
    each token, as they were asked for.
    """

    divergence: Float[Array, "*m"]
    loss: Float[Array, "*m"]
    agrees: Float[Array, "*m"]
    entropy: Float[Array, "*m"]
    attention_entropy: Float[Array, "*m"]
    kept_mass: Float[Array, "*m"]
    share_read: Float[Array, "*m"]
    share_bytes: Float[Array, "*m"]
    kept: dict[str, Any]

    def by_row(self, *names: str) -> dict[str, Float[np.ndarray, " r"]]:
        """Return the means of figures over the tokens of each row."""
        return {name: np.asarray(getattr(self, name), np.float64).mean(axis=1) for name in names}


class Forced(Base):
    """Flags of an experiment that runs a model on the last tokens of rows of text."""

    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(16, "rows of text", least=2, quick=2)
    length: int = setting(0, "tokens of a row, 0 for the model's context", least=0, quick=161)
    measured: int = setting(256, "the last tokens of a row, which are measured", least=4, quick=12)

    def bench(self) -> "TeacherForced":
        """Load the model, and return it with the rows."""
        served = load(self.model, dtype="float32", max_num_seqs=2)
        length = self.length or served.max_model_len
        rows = text.rows(served, self.text, self.rows, length)
        return TeacherForced(served, rows, length - 1 - self.measured)


class TeacherForced:
    """A model on rows of text, from token `start` of each on.

    Give no more rows than fit the memory with their dense predictions: rows x tokens x vocabulary numbers. `batch` rows
    pass at a time.
    """

    def __init__(self, model: Model, rows: Int[np.ndarray, "r t"], start: int, batch: int = 8) -> None:
        self.model, self.rows, self.start = model, rows, start
        self.batch = max(2, min(batch, len(rows)))
        self.calibration = model.decoder_config.calibration
        self.dense_log_probs: list[Array] = []
        self._programs: dict[Any, Any] = {}
        self._started: dict[Any, DecodeState] = {}
        self.dense = self.run(DENSE)

    @own_settings()
    def run(
        self,
        controller: Controller = DENSE,
        *,
        compression: Compression | None = None,
        given: Mapping[str, Any] | None = None,
        keep: tuple[str, ...] = (),
        few: bool = False,
    ) -> Scores:
        """Return the scores of a controller on all rows, or on the first `batch` of them.

        `given` are fields of the control state that are set before every token, "r m ..." or one number, whatever the
        laws say. `keep` names fields of the control state that the scores bring back.
        """
        config = self.config(controller, compression)
        given = {
            name: np.broadcast_to(np.asarray(one, np.float32), (*self.measured, *np.shape(one)[2:]))
            for name, one in (given or {}).items()
        }
        found = []
        for part in range(1 if few else -(-len(self.rows) // self.batch)):
            index = np.arange(part * self.batch, (part + 1) * self.batch) % len(self.rows)
            own = {name: one[index] for name, one in given.items()}
            scores = self._part(config, part, index, own, keep)
            count = min(self.batch, len(self.rows) - part * self.batch)
            found.append(jax.tree.map(lambda x, count=count: x[:count], scores))
        return jax.tree.map(lambda *each: np.concatenate(each), *found)

    @cached_property
    def true_masses(self) -> Float[np.ndarray, "r m l h n"]:
        """The share of attention mass of every query head on each block, of the dense model at each measured token."""
        return self.run(guarded(true_mass), given={"tolerance": 0.0}, keep=("block_mass",)).kept["block_mass"]

    def calibrated(self, calibration: Calibration) -> "TeacherForced":
        """Return the same rows, with the same dense predictions, of the model under another calibration."""
        other = copy.copy(self)
        other.calibration, other._programs = calibration, {}
        return other

    @property
    def measured(self) -> tuple[int, int]:
        """Rows, and measured tokens of each."""
        return len(self.rows), self.rows.shape[1] - 1 - self.start

    def config(self, controller: Controller, compression: Compression | None = None) -> DecoderConfig:
        """Return the model's decoder under a controller, with room for `batch` rows."""
        served = self.model.decoder_config
        length = self.rows.shape[1]
        return dataclasses.replace(
            served,
            num_slots=self.batch,
            batch=self.batch,
            num_pages=self.batch * -(-length // served.page_size) + 1,
            max_length=length,
            max_steps=1,
            controller=controller,
            compression=compression,
            calibration=self.calibration,
            keep=frozenset({"logits"}),
        )

    def _part(self, config: DecoderConfig, part: int, index: np.ndarray, given: dict, keep: tuple[str, ...]) -> Scores:
        """The scores of the rows of one part."""
        key = jax.tree.structure(config.controller), config.compression, keep, tuple(given)
        if key not in self._programs:
            scan = jax.jit(in_float32(partial(self._scan, config, keep)), donate_argnums=1)
            self._programs[key] = decoder(config), scan
        bound, scan = self._programs[key]
        reading = part, config.keeps, config.compression, config.by_mass_of
        if reading not in self._started:
            prompts = self.rows[index, : self.start + 1].tolist()
            self._started[reading] = prefilled(bound, self.model.weights, prompts, limit=2**30, temperature=0.0)
        laws = slot_laws(config)
        control = jax.vmap(lambda own: fresh_control(config, own, jnp.float32(0)))(laws)
        state = replace(self._started[reading], laws=laws, control=control)
        state = jax.tree.map(jnp.copy, state)  # which is donated; a number of a law may be the control's own
        true = self.dense_log_probs[part] if part < len(self.dense_log_probs) else None
        following = self.rows[index, self.start + 1 :]
        found: list[Scores] = []
        points = self._points(config)
        for begin, end in itertools.pairwise(sorted({0, *points, self.measured[1]})):
            if begin in points:
                for slot in range(self.batch):
                    state, _ = bound.compress(state, slot)
            cut = slice(begin, end)
            at = {name: np.swapaxes(one[:, cut], 0, 1) for name, one in given.items()}
            dense = None if true is None else true[cut]
            state, scores = scan(self.model.weights, state, following.T[cut], dense, at)
            if dense is None:
                scores, log_probs = scores
                self.dense_log_probs.append(log_probs)
            found.append(jax.device_get(scores))
        return jax.tree.map(lambda *each: np.swapaxes(np.concatenate(each), 0, 1), *found)

    def _points(self, config: DecoderConfig) -> set[int]:
        """The measured tokens before which the caches are compressed."""
        how, layout = config.compression, config.layout
        found: set[int] = set()
        if how is None or layout is None:
            return found
        room, shift = layout.region * config.page_size, 0
        prompt = self.start + 1
        while (point := how.point(prompt, shift, room)) is not None and point < self.rows.shape[1] - 1:
            found.add(point - self.start)
            shift = point - room
        return found

    def _scan(
        self,
        config: DecoderConfig,
        keep: tuple[str, ...],
        weights: Any,
        state: DecodeState,
        following: Array,
        dense: Array | None,
        given: dict[str, Array],
    ) -> tuple[DecodeState, Any]:
        """The state after the tokens, and the scores "m b"; without dense predictions, those are returned too."""
        plants = jax.eval_shape(partial(empty, config)).plants
        price = costs(config.plants, weights, plants, config.by_mass_of)[0]

        def advance(state: DecodeState, at: tuple) -> tuple[DecodeState, Any]:
            token, true, set_before = at
            set_before = {name: one.astype(getattr(state.control, name).dtype) for name, one in set_before.items()}
            state = replace(state, control=replace(state.control, **set_before))
            after, _ = step(config, weights, state)
            assert after.logits is not None
            got, seen = jax.nn.log_softmax(after.logits), after.signals
            true_or_own = got if true is None else true
            blocks = -(-after.length // config.page_size) * config.model.num_layers * config.model.num_kv_heads
            scores = Scores(
                divergence=jnp.sum(jnp.exp(true_or_own) * (true_or_own - got), axis=-1),
                loss=-jnp.take_along_axis(got, token[:, None], axis=-1)[:, 0],
                agrees=(jnp.argmax(true_or_own, axis=-1) == jnp.argmax(got, axis=-1)).astype(jnp.float32),
                entropy=seen.entropy,
                attention_entropy=seen.attention_entropy,
                kept_mass=seen.kept_mass,
                share_read=seen.blocks_read / blocks,
                share_bytes=(seen.blocks_read * price.block + seen.summaries_read * price.summary)
                / (blocks * price.block),
                kept={name: getattr(after.control, name) for name in keep},
            )
            state = replace(after, token=token)
            return state, (scores, got) if true is None else scores

        return jax.lax.scan(advance, state, (following, dense, given))
