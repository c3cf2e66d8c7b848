"""Training for long contexts: packed rows, weighed answers, stages of length, splits, resuming, the compact state."""

import dataclasses
import hashlib
import io
import json
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from et_jax.errors import UsageError
from et_jax.evidence.shapes import SMALL
from et_jax.models.bundled import bundled_folder
from et_jax.models.transformer import forward
from et_jax.tasks import words
from et_jax.tasks.generators import TASKS, document
from et_jax.training import card, compact, corpus, loop, loss, mixture, probe, recipe
from et_jax.training.mixture import Mixture
from et_jax.training.recipe import long_settings
from et_jax.training.schedule import Curriculum
from et_jax.training.settings import Settings
from et_jax.types import replace

WINDOW = 256
VOCAB = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The bundled tokenizer, and a corpus of sentences of words drawn by frequency."""
    random = np.random.default_rng(0)
    text = "the ship sailed over grey water and a captain spoke of her long voyage home to England"
    by_rank = np.array(text.split())
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(folder / "works.tar.xz", "w:xz") as tar:
        for index in range(8):
            drawn = [" ".join(by_rank[random.zipf(1.4, 9) % len(by_rank)]).capitalize() + "." for _ in range(160)]
            text = " ".join(drawn).encode()
            member = tarfile.TarInfo(f"works/work_{index:02}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    tokenizer = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    return corpus.prepare(folder / "works.tar.xz", folder / "data", VOCAB, tokenizer)


@pytest.fixture(scope="module")
def settings():
    model = dataclasses.replace(
        SMALL,
        vocab_size=VOCAB,
        max_positions=WINDOW,
        tie_embeddings=True,
        bos_token_id=corpus.END_ID,
        eos_token_ids=(corpus.END_ID,),
    )
    return Settings(
        model=model,
        schedule=Curriculum(warmup=2, decay_steps=4, stages=((0, 128), (5, 256))),
        mixture=Mixture(),
        window=WINDOW,
        report_every=1,
        evaluate_every=8,
        save_every=3,
        evaluated_tokens=512,
        probed_rows=2,
        probed_pairs=2,
    )


def plain_attention(q, k, v, segments):
    """Attention as its formula has it, every head and row at once."""
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool)) & (segments[:, :, None] == segments[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_packed_documents_do_not_attend_across_their_border(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    segments = jnp.array([[0] * 7 + [1] * 13, [0] * 12 + [1] * 5 + [-1] * 3])
    monkeypatch.setattr(loss, "QUERY_CHUNK", 8)
    packed, _ = loss.causal_attend(0, q, k, v, segments)
    np.testing.assert_allclose(packed, plain_attention(q, k, v, segments), atol=1e-5)
    for row, begin, end in ((0, 0, 7), (0, 7, 20), (1, 12, 17)):
        queries, keys, values = (y[row : row + 1, begin:end] for y in (q, k, v))
        alone, _ = loss.causal_attend(0, queries, keys, values, None)
        np.testing.assert_allclose(packed[row, begin:end], alone[0], atol=1e-6)


def test_another_document_in_the_row_changes_nothing(settings):
    params = loop.initial_state(settings).params
    tokens = jax.random.randint(jax.random.key(1), (1, 40), 0, VOCAB)
    segments = jnp.array([[0] * 15 + [1] * 25])
    other = tokens.at[:, :15].set(jax.random.randint(jax.random.key(2), (15,), 0, VOCAB))
    first, second = (loss.hidden_states(params, settings.model, row, segments) for row in (tokens, other))
    assert bool((first[:, 15:] == second[:, 15:]).all())
    assert not bool((first[:, :15] == second[:, :15]).all())
    assert not bool((loss.hidden_states(params, settings.model, other)[:, 15:] == second[:, 15:]).all())


def test_the_weighted_loss_and_its_gradient_are_those_of_the_formula(settings):
    params = loop.initial_state(settings).params
    tokens = jax.random.randint(jax.random.key(1), (3, 21), 0, VOCAB)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weights = jax.random.uniform(jax.random.key(2), targets.shape) * 10.0
    segments = jnp.broadcast_to(jnp.arange(20) // 9, targets.shape)

    def attend(layer, q, k, v, memory):
        return plain_attention(q, k, v, segments), memory

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
        scores, _ = forward(loss.unstack(params, 2), settings.model, inputs, positions, attend, None)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]
        return (losses * weights).sum() / weights.sum()

    expected, wanted = jax.value_and_grad(plain)(params)
    found, gradients = jax.value_and_grad(loss.mean_loss)(params, settings.model, inputs, targets, weights, segments)
    assert float(found) == pytest.approx(float(expected), abs=1e-3)  # bfloat16 rounds logits of size 0.1 to 2^-12
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.03 * jnp.linalg.norm(formula)  # bfloat16: 2^-8 per product


def test_hits_are_where_the_likeliest_token_of_the_plain_model_is_the_target(settings):
    params = loop.initial_state(settings).params
    inputs = jax.random.randint(jax.random.key(1), (2, 24), 0, VOCAB)

    def attend(layer, q, k, v, memory):
        return plain_attention(q, k, v, jnp.zeros(inputs.shape, jnp.int32)), memory

    positions = jnp.broadcast_to(jnp.arange(24), inputs.shape)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), loss.unstack(params, 2))
    best = forward(exact, settings.model, inputs, positions, attend, None)[0].argmax(axis=-1)
    targets = jnp.where(jnp.arange(24) % 3 == 0, best, (best + 1) % VOCAB)
    found = loss.hits(params, settings.model, inputs, targets)
    assert (found == (jnp.arange(24) % 3 == 0)).mean() > 0.9  # products in bfloat16 may swap the two likeliest


def rows(data, step, length=128, seed=0, **others):
    tokenizer, train, _ = data
    return mixture.mixed_rows(
        Mixture(**others), train, tokenizer, seed=seed, step=step, num_windows=4, length=length, window=WINDOW
    )


def test_rows_are_novels_and_documents_whose_answers_weigh_most(data):
    tokenizer, *_ = data
    found, later = rows(data, 0), rows(data, 700)
    assert found.weights is not None and found.segments is not None and later.weights is not None
    assert found.inputs.shape == (8, 128)
    assert (found.weights[:2] == 1).all()  # a quarter of the first steps is novels
    assert np.unique(found.weights[2:]) == pytest.approx([0.0, 0.1, 1.0, 5.0])
    for inputs, targets, weights, segments in zip(
        found.inputs[2:], found.targets[2:], found.weights[2:], found.segments[2:], strict=True
    ):
        for segment in range(segments.max() + 1):
            own = segments == segment
            assert inputs[own][0] == corpus.END_ID
            assert (inputs[own][1:] == targets[own][:-1]).all()
            text = tokenizer.decode(targets[own].tolist())
            answers = tokenizer.decode(targets[own & (weights == 5)].tolist()).split()
            assert answers
            assert all(text.count(word.strip(".")) > 1 for word in answers)  # said before it is asked
        assert (weights[segments == -1] == 0).all()
    assert (later.weights[:4] == 1).all()  # half, later


def test_the_rows_of_a_step_are_the_same_whenever_they_are_made(data):
    found, again = rows(data, 11), rows(data, 11)
    for name in ("inputs", "targets", "weights", "segments"):
        assert np.array_equal(getattr(found, name), getattr(again, name))
    for other in (rows(data, 12), rows(data, 11, seed=1)):
        assert not np.array_equal(found.targets[:2], other.targets[:2])  # novels
        assert not np.array_equal(found.targets[2:], other.targets[2:])  # tasks


def drawn(data, step, length):
    """The documents of a row, drawn as those of a step are."""
    tokenizer, train, _ = data
    random = np.random.default_rng((0, step, 1))
    hay = mixture.haystack(train, tokenizer, random, WINDOW)
    return mixture.documents(Mixture(), tokenizer, random, length, hay, mixture.vocabulary(hay, tokenizer))


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_documents_of_every_task_fit_into_a_row(data, length):
    seen = set()
    for step in range(40):
        found = drawn(data, step, length)
        assert sum(len(mixture.encode(one, data[0], Mixture())[0]) for one in found) <= length
        seen |= {one.task for one in found}
    assert seen == set(TASKS)


def test_words_of_a_step_are_those_of_its_sentences_but_for_the_test_split(data):
    tokenizer, *_ = data
    own = words.vocabulary("train")
    used = mixture.vocabulary(
        [" Many strange umbrellas, and pale horses, lay in the unfathomable, inexhaustible mud."], tokenizer
    )
    added = {"strange", "and", "pale", "horses", "lay", "the", "mud"}  # of two tokens at most
    assert set(used.words) - set(own.words) == {word for word in added if words.belongs(word, "train")}
    assert set(used.words) & added != added  # some are of the other split
    assert set(used.copied) >= added
    assert not {*used.names, *used.words} & {*words.vocabulary("test").names, *words.vocabulary("test").words}


def test_no_test_item_is_in_the_training_stream(data):
    def digest(item):
        return hashlib.sha256(item.encode()).digest()

    trained = set()
    for step in range(60):
        for found in drawn(data, step, 512):
            trained |= {digest(item) for item in found.items}
            trained |= {digest(turn.answer) for turn in found.turns}
    tested = set()
    for task in TASKS:
        for seed in range(40):
            made = document(task, count=len, length=2000, depth=0.5, seed=seed, split="test", num_pairs=7)
            tested |= {digest(item) for item in made.items} | {digest(turn.answer) for turn in made.turns}
    assert len(trained) > 400
    assert len(tested) > 400
    assert not trained & tested


def test_the_curriculum_grows_rows_and_falls_to_zero_at_its_end():
    plan = Curriculum(warmup=10, decay_steps=20, stages=((0, 128), (30, 256), (60, 2048)))
    assert [plan.length(step, 100) for step in (0, 29, 30, 59, 60, 99)] == [128, 128, 256, 256, 2048, 2048]
    assert plan.factor(0, 100) == pytest.approx(0.1)
    assert plan.factor(50, 100) == plan.factor(50, None) == 1.0
    assert plan.factor(99, 100) == pytest.approx(1 / 20)
    steps = next(found for step in range(1000) if (found := plan.planned(step, 2.0, 300.0 - 2.0 * step)))
    assert steps == 150  # 300 seconds of 2
    assert all(plan.factor(step, None) == plan.factor(step, steps) for step in range(steps - 20))


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return {record["step"]: record["loss"] for record in log(folder)}


def run(settings, data, folder, steps, start=None):
    tokenizer, train, held_out = data
    return loop.train(settings, train, held_out, folder, steps, None, tokenizer=tokenizer, start=start)


def repeats_and_resumes(settings, data, tmp_path, monkeypatch, steps, killed_at):
    assert run(settings, data, tmp_path / "whole", steps) == steps
    made = loop.mixed_rows

    def killed(*arguments, **others):
        if others["step"] == killed_at:
            raise KeyboardInterrupt  # nothing is saved, as after kill -9
        return made(*arguments, **others)

    monkeypatch.setattr(loop, "mixed_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        run(settings, data, tmp_path / "cut", steps)
    monkeypatch.undo()
    assert run(settings, data, tmp_path / "cut", steps) == steps
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_run_repeats_and_a_killed_one_resumes_to_the_same_losses(settings, data, tmp_path, monkeypatch):
    repeats_and_resumes(settings, data, tmp_path, monkeypatch, steps=8, killed_at=7)
    figures = log(tmp_path / "whole")
    assert {record["length"] for record in figures} == {128, 256}
    assert {f"accuracy/{task}" for task in TASKS} <= figures[-1].keys()


@pytest.mark.slow
def test_two_hundred_steps_repeat_and_resume(settings, data, tmp_path, monkeypatch):
    settings = dataclasses.replace(settings, save_every=50, evaluate_every=200)
    repeats_and_resumes(settings, data, tmp_path, monkeypatch, steps=200, killed_at=170)


def test_a_mixture_needs_the_tokenizer(settings, data, tmp_path):
    _, train, held_out = data
    with pytest.raises(UsageError, match="needs the tokenizer"):
        loop.train(settings, train, held_out, tmp_path, 1, None)


def test_a_compact_state_keeps_the_weights_and_rounds_the_memory(settings, data, tmp_path):
    run(settings, data, tmp_path / "run", 3)
    state, step = loop.load_state(tmp_path / "run", settings)
    size = compact.write(state, step, tmp_path / "kept")
    assert size == sum(file.stat().st_size for file in (tmp_path / "kept").iterdir())
    found, done = compact.read(tmp_path / "kept", settings)
    assert done == step == 3
    for kept, before in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params), strict=True):
        assert bool((kept == before).all())
    for kept, before in zip(jax.tree.leaves(found.optimizer), jax.tree.leaves(state.optimizer), strict=True):
        assert kept.dtype == before.dtype
        np.testing.assert_allclose(kept, before, rtol=2**-8)
    assert run(settings, data, tmp_path / "on", 5, start=(found, done)) == 5
    assert run(settings, data, tmp_path / "run", 5) == 5
    on, whole = losses(tmp_path / "on"), losses(tmp_path / "run")
    assert set(on) == {4, 5}
    assert on[4] == whole[4]  # the memory first acts on the step after
    assert on[5] == pytest.approx(whole[5], rel=1e-3)


def test_a_compact_state_of_another_model_is_refused(settings, data, tmp_path):
    with pytest.raises(UsageError, match="no training state"):
        compact.read(tmp_path, settings)
    compact.write(loop.initial_state(settings), 0, tmp_path)
    other = dataclasses.replace(settings, model=dataclasses.replace(settings.model, intermediate_size=64))
    with pytest.raises(UsageError, match="another model"):
        compact.read(tmp_path, other)


def test_a_probe_asks_what_was_held_out_and_marks_the_answer(settings, data):
    tokenizer, _, held_out = data
    given = probe.probe(tokenizer, held_out, 128, 3, 2)
    assert given.inputs.shape == (3 * len(TASKS), 128)
    for inputs, targets, mask in zip(given.inputs, given.targets, given.answer_mask, strict=True):
        end = np.flatnonzero(mask)[-1]
        assert (inputs[1 : end + 1] == targets[:end]).all()
        assert tokenizer.decode(targets[mask].tolist()).startswith(" ")
    params = loop.initial_state(settings).params
    assert set(probe.accuracy(params, settings, given)) == set(TASKS)
    certain = dataclasses.replace(given, answer_mask=np.zeros_like(given.answer_mask))
    assert set(probe.accuracy(params, settings, certain).values()) == {1.0}


def test_the_card_tells_of_stages_and_of_what_is_found_again(settings, data, tmp_path):
    _, _, held_out = data
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    for side, name in (("train", "a.txt"), ("held_out", "Kept_1850.txt")):
        (run / "data" / f"{side}.json").write_text(json.dumps({"works": [name]}))
    (run / "ngram.json").write_text(json.dumps({"order": 5, "train_tokens": 9, "per_token": 4.0, "per_byte": 1.0}))
    (run / "log.jsonl").write_text(json.dumps({"minutes": 90.0}) + "\n")
    cells = [("passkey", 128, 0.0, 1.0), ("passkey", 128, 1.0, 0.5), ("counting", 256, 0.0, 0.25)]
    names = ("task", "length", "depth", "accuracy")
    rows = [dict(zip(names, cell, strict=True)) | {"examples": 8} for cell in cells]
    (tmp_path / "accuracy.json").write_text(json.dumps({"haystack": "wells.txt", "summary": rows}))
    told = card.Run(
        folder=run, step=8, hardware="a test", history="Begun again twice.", accuracy=tmp_path / "accuracy.json"
    )
    figures = card.Figures(per_token={128: 4.25, 256: 4.125}, by_position={(0, 256): 4.125})
    card.write_card(figures, settings, told, held_out, tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    for part in (
        "128 from step 0, 256 from step 5",
        "25% of them novels",  # all eight steps are below the first share
        "| passkey | 128 | 0.75 | 1.00 | 0.50 |",
        "| counting | 256 | 0.25 | 0.25 |  |",
        "wells.txt",
        "Begun again twice.",
        "--recipe long --from runs/short/model --steps 8 --seed 0",
        "in 1.5 hours on a test",
        "0.125 nats per token worse than the 5-gram",
    ):
        assert part in text


def test_the_long_recipe_is_the_bundled_shape_with_a_base_for_its_length():
    model = long_settings().model
    turned = 2048 * model.rope_theta ** (-np.arange(0, model.head_dim, 2) / model.head_dim)
    assert (turned < 1).sum() == 10  # channels that turn by less than a radian over the whole length
    assert model.max_positions == max(long_settings().schedule.lengths)


def test_a_setting_grows_rows_beyond_2048():
    grown = long_settings(longest=8192)
    assert grown.model.max_positions == grown.window == grown.schedule.lengths[-1] == 8192
    assert grown.schedule.lengths[-3:] == (2048, 4096, 8192)
    assert isinstance(grown.schedule, Curriculum)
    begins = [begin for begin, _ in grown.schedule.stages]
    assert begins == sorted(begins)
    with pytest.raises(UsageError, match="choose 2048, 4096, 8192"):
        long_settings(longest=5000)
    with pytest.raises(UsageError, match="choose 2048"):
        long_settings(longest=1024)
    with pytest.raises(UsageError, match="belongs to --recipe long"):
        recipe.settings("short", 0, 8192)


def test_a_start_from_weights_is_those_weights(settings):
    params = loss.unstack(loop.initial_state(settings).params, 2)
    state, done = loop.start_from(replace(params, embedding=params.embedding.astype(jnp.bfloat16)), settings)
    assert done == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert bool((state.params.layers[0].q[1] == params.layers[1].q).all())
