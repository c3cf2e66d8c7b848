"""Training learns, repeats, and resumes where it was killed or told to end."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from small_runs import EXPERTS, log, losses, run

from et_jax.errors import UsageError
from et_jax.models.weights import Dense
from et_jax.tasks.generators import TASKS
from et_jax.training import corpus, loop, loss
from et_jax.types import replace

pytestmark = pytest.mark.slow


def test_training_learns_and_an_interrupted_run_continues_the_same(settings, data, tmp_path, monkeypatch):
    _, train, held_out = data
    assert loop.train(settings, train, held_out, tmp_path / "whole", steps=10, minutes=None) == 10
    figures = log(tmp_path / "whole")
    assert figures[-1]["held_out_per_token"] < figures[0]["loss"] - 0.5
    assert {record["length"] for record in figures} == {8, 32}

    rows = corpus.training_rows

    def killed_at_eight(*arguments, **others):
        if others["step"] == 7:
            raise KeyboardInterrupt  # nothing is saved, as after kill -9; the last checkpoint is step 6
        return rows(*arguments, **others)

    monkeypatch.setattr(corpus, "training_rows", killed_at_eight)
    with pytest.raises(KeyboardInterrupt):
        loop.train(settings, train, held_out, tmp_path / "cut", steps=10, minutes=None)
    monkeypatch.undo()
    assert loop.train(settings, train, held_out, tmp_path / "cut", steps=10, minutes=None) == 10
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_signal_saves_the_step_that_was_done(settings, data, tmp_path, monkeypatch):
    _, train, held_out = data
    rows = corpus.training_rows

    def signalled(*arguments, **others):
        if others["step"] == 3:
            loop.signal.raise_signal(loop.signal.SIGTERM)
        return rows(*arguments, **others)

    monkeypatch.setattr(corpus, "training_rows", signalled)
    assert loop.train(settings, train, held_out, tmp_path, steps=10, minutes=None) == 4
    assert loop.load_params(tmp_path, settings)[1] == 4
    assert loop.signal.getsignal(loop.signal.SIGTERM) is loop.signal.SIG_DFL


def test_a_run_needs_exactly_one_end(settings, data, tmp_path):
    _, train, held_out = data
    with pytest.raises(UsageError, match="either --steps or --minutes"):
        loop.train(settings, train, held_out, tmp_path, steps=None, minutes=None)
    with pytest.raises(UsageError, match="no checkpoint"):
        loop.load_params(tmp_path, settings)


def test_a_mixture_of_experts_repeats_and_a_killed_run_resumes_to_the_same_losses(
    mixed_settings, mixed_data, tmp_path, monkeypatch
):
    mixture = dataclasses.replace(mixed_settings.model, experts=EXPERTS)
    settings = dataclasses.replace(mixed_settings, model=mixture)
    assert run(settings, mixed_data, tmp_path / "whole", 8) == 8
    made = loop.mixed_rows

    def killed(*arguments, **others):
        if others["step"] == 7:
            raise KeyboardInterrupt  # nothing is saved, as after kill -9
        return made(*arguments, **others)

    monkeypatch.setattr(loop, "mixed_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        run(settings, mixed_data, tmp_path / "cut", 8)
    monkeypatch.undo()
    assert run(settings, mixed_data, tmp_path / "cut", 8) == 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    figures = log(tmp_path / "whole")
    assert {record["length"] for record in figures} == {128, 256}
    assert {f"accuracy/{task}" for task in TASKS} <= figures[-1].keys()


def test_a_mixture_needs_the_tokenizer(mixed_settings, mixed_data, tmp_path):
    _, train, held_out = mixed_data
    with pytest.raises(UsageError, match="needs the tokenizer"):
        loop.train(mixed_settings, train, held_out, tmp_path, 1, None)


def test_a_start_from_weights_is_those_weights(mixed_settings):
    params = loss.unstack(loop.initial_state(mixed_settings).params)
    state, done = loop.start_from(
        replace(params, embedding=Dense(array=params.embedding.array.astype(jnp.bfloat16))), mixed_settings
    )
    assert done == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert bool((state.params.layers[0].q.array[1] == params.layers[1].q.array).all())


def test_muon_turns_the_matrices_of_layers_and_experts_and_adam_the_rest(settings):
    experts = dataclasses.replace(settings, model=dataclasses.replace(settings.model, experts=EXPERTS))
    state = jax.eval_shape(loop.initial_state, experts)
    turned = {leaf.shape for leaf in jax.tree.leaves(state.optimizer[1].inner_states["muon"]) if leaf.ndim}
    width, narrow = experts.model.hidden_size, experts.model.intermediate_size
    assert {(1, 6, 16, width), (1, 6, width, 16), (1, narrow, width), (1, width, narrow)} < turned
    assert not {(1, 6, width), state.params.embedding.shape} & turned  # a router, and the embedding
