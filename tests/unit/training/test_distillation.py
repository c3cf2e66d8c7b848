"""A student learns its teacher's distributions: the formula, the start, the agreement, the run, the refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_training import plain_pass
from small_runs import SCHEDULE, VOCAB, WINDOW

from et_jax.errors import UsageError
from et_jax.models.checkpoint import load
from et_jax.models.weights import Dense
from et_jax.training import corpus, distillation, export, loop, loss
from et_jax.training.distillation import Teacher
from et_jax.types import replace

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH = 2, 12, 16  # of the formula's tokens; and the student's width, half of its teacher's


@pytest.fixture(scope="module")
def teacher(settings, data):
    """A model after a few steps, made surer of what it has learned."""
    state = loop.initial_state(settings)
    for step in range(12):
        rows = corpus.training_rows(data[1], settings.seed, step, settings.windows_per_step, WINDOW, WINDOW)
        state, _ = loop.train_step(state, settings, rows.inputs, rows.targets, np.float32(1))
    sure = replace(state.params, embedding=Dense(array=4 * state.params.embedding.array))
    return Teacher(config=settings.model, params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), sure))


@pytest.fixture(scope="module")
def student(settings):
    """The settings of a student of half the width."""
    shape = dataclasses.replace(settings.model, hidden_size=WIDTH, head_dim=4)
    schedule = dataclasses.replace(SCHEDULE, short_length=WINDOW)
    return dataclasses.replace(settings, model=shape, schedule=schedule, distilled=True)


def log_probabilities(params, config, inputs, segments=None):
    """What plain attention gives of every next token."""
    plain = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loss.unstack(params))
    return jax.nn.log_softmax(plain_pass(plain, config, inputs, segments))


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_divergence(student, teacher, packed):
    inputs = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, VOCAB)
    weights, segments = jnp.ones(inputs.shape), None
    if packed:
        weights = jax.random.uniform(jax.random.key(2), inputs.shape) * 5.0
        segments = jnp.broadcast_to(jnp.arange(LENGTH) // 5, inputs.shape)
    params = loop.start_beside(teacher, student)[0].params
    log_p = log_probabilities(teacher.params, teacher.config, inputs, segments)

    def plain(params):
        log_q = log_probabilities(params, student.model, inputs, segments)
        return ((jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1) * weights).sum() / weights.sum()

    def found_of(params):
        judged = params, student.model, inputs, teacher.params, teacher.config
        return loss.mean_divergence(*judged, *((weights, segments) if packed else ()))

    expected, wanted = jax.jit(jax.value_and_grad(plain))(params)
    found, gradients = jax.jit(jax.value_and_grad(found_of))(params)
    assert float(expected) > 0.1  # nats: enough to tell one formula from another
    assert float(found) == pytest.approx(float(expected), rel=0.02)  # products in bfloat16
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.05 * jnp.linalg.norm(formula)


def test_a_teacher_is_read_as_it_is_or_refused(settings, student, teacher, data, mixed_data, tmp_path):
    tokenizer, train, held_out = data
    folder, damaged = tmp_path / "teacher", tmp_path / "damaged"
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 1.0001, teacher.params)  # rounded to the teacher's
    size = export.export(wide, teacher.config, tokenizer, folder)
    assert size == sum(file.stat().st_size for file in folder.iterdir())
    assert load(folder)[1].embedding.dtype == jnp.bfloat16
    found, own = distillation.read_teacher(folder, student)
    assert found.config == teacher.config
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), found, teacher))
    distillation.check_tokens(own, corpus.read_tokenizer(folder))
    divided = dataclasses.replace(teacher.config, architecture="granite", score_scale=8**-0.5, logit_divisor=8.0)
    export.export(teacher.params, divided, tokenizer, damaged)
    for attempt, words in (
        (lambda: distillation.check_tokens(own, mixed_data[0]), "another tokenizer than the teacher's"),
        (
            lambda: distillation.read_teacher(folder, dataclasses.replace(student, window=2 * WINDOW)),
            "reads 32 tokens and the longest rows are 64",
        ),
        (lambda: distillation.read_teacher(damaged, student), "a divisor of its logits"),
        (lambda: corpus.read_tokenizer(tmp_path), r"no readable tokenizer\.json"),
        (lambda: loop.train(settings, train, held_out, tmp_path, 1, None, teacher=teacher), "need a teacher"),
    ):
        with pytest.raises(UsageError, match=words):
            attempt()
