"""Training learns, repeats, and resumes where it was killed or told to end."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from small_runs import log, losses, run

from et_jax.errors import UsageError
from et_jax.models.weights import Dense
from et_jax.tasks.generators import TASKS
from et_jax.training import corpus, loop, loss
from et_jax.types import replace

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def amid(monkeypatch, module, made, step, happens):
    """Call `happens` when `module.made` makes the rows of a step."""
    rows = getattr(module, made)
    with monkeypatch.context() as patch:
        patch.setattr(module, made, lambda *given, **how: (how["step"] == step and happens(), rows(*given, **how))[1])
        yield


def test_a_run_learns_and_a_signal_saves_the_step_that_was_done(settings, data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no checkpoint"):
        loop.load_params(tmp_path, settings)
    with amid(monkeypatch, corpus, "training_rows", 3, lambda: loop.signal.raise_signal(loop.signal.SIGTERM)):
        assert run(settings, data, tmp_path, 10) == 4
    assert loop.load_params(tmp_path, settings)[1] == 4
    assert loop.signal.getsignal(loop.signal.SIGTERM) is loop.signal.SIG_DFL
    assert run(settings, data, tmp_path, 10) == 10
    figures = log(tmp_path)
    assert figures[-1]["held_out_per_token"] < figures[0]["loss"] - 0.5
    assert {record["length"] for record in figures} == {8, 32}


def test_a_killed_run_resumes_to_the_same_losses(mixed_settings, mixed_data, tmp_path, monkeypatch):
    assert run(mixed_settings, mixed_data, tmp_path / "whole", 8) == 8
    kill = mock.Mock(side_effect=KeyboardInterrupt)
    with amid(monkeypatch, loop, "mixed_rows", 7, kill), pytest.raises(KeyboardInterrupt):
        run(mixed_settings, mixed_data, tmp_path / "cut", 8)
    other = loop.initial_state(dataclasses.replace(mixed_settings, seed=5)), 0  # a checkpoint goes before any start
    assert run(mixed_settings, mixed_data, tmp_path / "cut", 8, start=other) == 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    figures = log(tmp_path / "whole")
    assert {record["length"] for record in figures} == {128, 256}
    assert {f"accuracy/{task}" for task in TASKS} <= figures[-1].keys()


def test_a_run_that_cannot_be_is_refused(settings, data, mixed_settings, mixed_data, tmp_path):
    for each, (_, train, held_out), steps, others, words in (
        (settings, data, None, {}, "either --steps or --minutes"),
        (mixed_settings, mixed_data, 1, {}, "needs the tokenizer"),
        (dataclasses.replace(settings, distilled=True), data, 1, {"tokenizer": data[0]}, "need a teacher"),
    ):
        with pytest.raises(UsageError, match=words):
            loop.train(each, train, held_out, tmp_path, steps, None, **others)


def test_a_start_from_weights_is_those_weights(mixed_settings):
    params = loss.unstack(loop.initial_state(mixed_settings).params)
    rounded = Dense(array=params.embedding.array.astype(jnp.bfloat16))
    state, done = loop.start_from(replace(params, embedding=rounded), mixed_settings)
    assert done == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert bool((state.params.layers[0].q.array[1] == params.layers[1].q.array).all())


def test_muon_turns_the_matrices_of_layers_and_adam_the_rest(settings):
    state = jax.eval_shape(loop.initial_state, settings)
    turned = {leaf.shape for leaf in jax.tree.leaves(state.optimizer[1].inner_states["muon"]) if leaf.ndim}
    layers, width, narrow = settings.model.num_layers, settings.model.hidden_size, settings.model.intermediate_size
    assert {(layers, narrow, width), (layers, width, narrow)} < turned
    assert state.params.embedding.shape not in turned and (layers, width) not in turned  # nor a norm
