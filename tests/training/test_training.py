"""Training: the split, the order of the data, the loss, resuming, the export, and the n-gram yardstick."""

import collections
import dataclasses
import io
import itertools
import json
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.errors import UsageError
from et_jax.evidence.shapes import SMALL
from et_jax.models import checkpoint
from et_jax.models.transformer import forward
from et_jax.training import card, corpus, export, loop, loss, ngram
from et_jax.training.recipe import bundled_settings
from et_jax.training.schedule import Schedule

VOCAB = 300
WINDOW = 32
SCHEDULE = Schedule(warmup=2, short_length=8, long_length=32)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A corpus of twelve works of words drawn by frequency."""
    random = np.random.default_rng(0)
    words = np.array(
        ["the", "ship", "sailed", "over", "grey", "water", "and", "a", "captain", "spoke.\n", "“No,”", "she"]
    )
    path = tmp_path_factory.mktemp("corpus") / "works.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for index in range(12):
            text = " ".join(words[random.zipf(1.5, 400 + 20 * index) % len(words)]).encode()
            member = tarfile.TarInfo(f"works/work_{index:02}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


@pytest.fixture(scope="module")
def data(archive, tmp_path_factory):
    return corpus.prepare(archive, tmp_path_factory.mktemp("data"), VOCAB)


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
    return loop.Settings(
        model=model,
        schedule=SCHEDULE,
        window=WINDOW,
        report_every=1,
        evaluate_every=4,
        save_every=3,
        evaluated_tokens=64,
    )


def test_split_holds_out_whole_works_and_the_same_ones_every_time(archive):
    names = list(corpus.read_works(archive))
    train, held_out = corpus.split(names, 0.2)
    assert set(train) | set(held_out) == set(names)
    assert not set(train) & set(held_out)
    assert len(held_out) == 2
    assert corpus.split(reversed(names), 0.2) == (train, held_out)
    assert train != sorted(names)[: len(train)]  # chosen by hash, not by name


def test_corpus_errors_say_how_to_mend_them(tmp_path):
    with pytest.raises(UsageError, match="--corpus"):
        corpus.read_works(tmp_path / "absent.tar")
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(UsageError, match="tar archive"):
        corpus.read_works(tmp_path / "text.tar")


def test_tokens_are_the_text(archive, data):
    tokenizer, train, held_out = data
    works = corpus.read_works(archive)
    for tokens, names in zip((train, held_out), corpus.split(works), strict=True):
        spans = itertools.pairwise(tokens.starts)
        texts = [tokenizer.decode(tokens.ids[begin : end - 1].tolist()) for begin, end in spans]
        assert texts == [works[name] for name in names]
        assert all(tokens.ids[end - 1] == corpus.END_ID for end in tokens.starts[1:])
        assert tokens.num_bytes == sum(len(works[name].encode()) for name in names)
    assert tokenizer.encode("the ship").ids[0] == corpus.END_ID == tokenizer.token_to_id(corpus.END_OF_TEXT)


def test_an_epoch_reads_each_token_at_most_once_and_crosses_no_border(data):
    _, train, _ = data
    for epoch in range(3):
        starts = corpus.window_starts(train, seed=1, epoch=epoch, window=WINDOW)
        work = np.searchsorted(train.starts, starts, side="right")
        assert (work == np.searchsorted(train.starts, starts + WINDOW - 1, side="right")).all()
        assert (np.diff(np.sort(starts)) >= WINDOW).all()
        assert len(starts) == sum((end - begin) // WINDOW for begin, end in itertools.pairwise(train.starts))
    assert not np.array_equal(starts, corpus.window_starts(train, seed=1, epoch=1, window=WINDOW))


def test_rows_of_a_step_are_the_same_tokens_whatever_their_length(data):
    _, train, _ = data
    long = corpus.training_rows(train, seed=0, step=70, num_windows=4, length=WINDOW, window=WINDOW)
    short = corpus.training_rows(train, seed=0, step=70, num_windows=4, length=8, window=WINDOW)
    assert np.array_equal(long.targets.reshape(-1), short.targets.reshape(-1))
    for rows in (long, short):
        assert (rows.inputs[:, 0] == corpus.END_ID).all()
        assert np.array_equal(rows.inputs[:, 1:], rows.targets[:, :-1])


def test_held_out_rows_hold_every_token_once(data):
    _, _, held_out = data
    rows = corpus.held_out_rows(held_out, 32)
    assert np.array_equal(rows.targets[rows.target_mask], held_out.ids)


def test_loss_and_gradient_are_those_of_the_plain_formula(settings):
    params = loop.initial_state(settings).params
    tokens = jax.random.randint(jax.random.key(1), (3, 21), 0, VOCAB)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def attend(layer, q, k, v, memory):
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
        past = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(past, scores, -jnp.inf)), v), memory

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
        scores, _ = forward(loss.unstack(params, 2), settings.model, inputs, positions, attend, None)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1).mean()

    expected, wanted = jax.value_and_grad(plain)(params)
    found, gradients = jax.value_and_grad(loss.mean_loss)(params, settings.model, inputs, targets)
    assert float(found) == pytest.approx(float(expected), abs=1e-3)  # bfloat16 rounds logits of size 0.1 to 2^-12
    assert loss.token_losses(params, settings.model, inputs, targets).mean().item() == pytest.approx(
        float(found), abs=1e-5
    )
    for formula, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        assert jnp.linalg.norm(formula - got) <= 0.03 * jnp.linalg.norm(formula)  # bfloat16: 2^-8 per product


def test_attention_in_chunks_is_attention_at_once(monkeypatch):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    whole, _ = loss.causal_attend(0, q, k, v, None)
    monkeypatch.setattr(loss, "QUERY_CHUNK", 8)
    chunked, _ = loss.causal_attend(0, q, k, v, None)
    np.testing.assert_allclose(whole, chunked, atol=1e-6)


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    """The loss of each step, the last one logged where a step was done twice."""
    return {record["step"]: record["loss"] for record in log(folder)}


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


def test_a_deadline_plans_a_run_that_its_number_of_steps_would_repeat():
    schedule = Schedule(warmup=10)
    steps = next(found for step in range(20, 1000) if (found := schedule.planned(step, 1.0, 1000.0 - step)))
    begin = next(step for step in range(20, steps) if schedule.planned(step, 1.0, 1000.0 - step))
    for step in range(begin):  # before the plan was made
        assert schedule.factor(step, None) == schedule.factor(step, steps)
        assert schedule.length(step, None) == schedule.length(step, steps)
    seconds = sum(schedule.long_cost if schedule.length(step, steps) == 2048 else 1.0 for step in range(steps))
    assert seconds == pytest.approx(1000.0, rel=0.01)
    assert 0 < schedule.factor(steps - 1, steps) < 0.01
    assert max(schedule.factor(step, steps) for step in range(steps)) == 1.0


def test_export_loads_back_as_the_rounded_weights(settings, data, tmp_path):
    tokenizer, *_ = data
    params = loop.initial_state(settings).params
    size = export.export(params, settings.model, tokenizer, tmp_path)
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    config, loaded = checkpoint.load(tmp_path)
    assert config == settings.model
    wanted = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loss.unstack(params, 2))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), wanted, loaded))
    again = corpus.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.decode(again.encode("the ship sailed").ids) == "the ship sailed"


def test_the_bundled_model_fits_into_eight_megabytes():
    specs = checkpoint.weight_specs(bundled_settings().model)
    assert 2 * sum(np.prod(spec.shape) for spec in specs.values()) < 7.7e6  # the tokenizer takes 0.3


def test_the_card_tells_what_was_measured(archive, settings, data, tmp_path):
    _, train, held_out = data
    run = tmp_path / "run"
    corpus.prepare(archive, run / "data", VOCAB)
    loop.train(settings, train, held_out, run, steps=4, minutes=None)
    params, step = loop.load_params(run, settings)
    figures = card.measure(params, settings, held_out)
    parts = [(end - begin) * loss for (begin, end), loss in figures.by_position.items()]
    assert sum(parts) / 32 == pytest.approx(figures.per_token[32], rel=0.1)  # padding thins the last positions
    told = card.Run(folder=run, step=step, hardware="a test")
    arguments = (figures, settings, told, held_out, tmp_path / "README.md")
    with pytest.raises(UsageError, match="ngram_baseline"):
        card.write_card(*arguments)
    (run / "ngram.json").write_text(json.dumps({"order": 5, "train_tokens": 9, "per_token": 1.0, "per_byte": 0.5}))
    card.write_card(*arguments)
    text = (tmp_path / "README.md").read_text()
    assert f"{figures.per_token[32]:.3f}" in text
    assert "worse" in text


def test_hours_add_up_over_resumed_runs(tmp_path):
    minutes = (3.0, 30.0, 2.0, 15.0, 1.0, 15.0)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"minutes": value}) + "\n" for value in minutes))
    assert card.hours(tmp_path / "log.jsonl") == 1.0


def kneser_ney(stream, order, vocab_size):
    """Interpolated modified Kneser-Ney by dictionaries, straight from Chen & Goodman 1998."""
    padded = [0] * (order - 1) + list(stream)
    grams = [tuple(padded[i : i + order]) for i in range(len(stream))]
    counts = {order: collections.Counter(grams)}
    for n in range(order - 1, 0, -1):
        counts[n] = collections.Counter(gram[1:] for gram in counts[n + 1])

    def taken(n):
        n1, n2, n3, n4 = (sum(c == i for c in counts[n].values()) for i in range(1, 5))
        if n == 1:  # as every token follows many others here, no count is rare
            return [0, 0.75, 0.75, 0.75]
        y = n1 / (n1 + 2 * n2)
        return [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]

    discount = {n: taken(n) for n in counts}

    def probability(context, word):
        n = len(context) + 1
        below = probability(context[1:], word) if context else 1 / vocab_size
        followers = {gram[-1]: count for gram, count in counts[n].items() if gram[:-1] == context}
        if not followers:
            return below
        total = sum(followers.values())
        own = followers.get(word, 0)
        left = sum(discount[n][min(count, 3)] for count in followers.values())
        return (own - discount[n][min(own, 3)] + left * below) / total

    return probability


def test_ngram_is_kneser_ney_by_dictionaries_and_sums_to_one():
    random = np.random.default_rng(0)
    stream = (random.zipf(1.6, 600) % 11).astype(np.uint16)
    model = ngram.fit(stream, vocab_size=11, order=3, before=0)
    direct = kneser_ney(stream.tolist(), 3, 11)
    contexts = [(0, 0), (1, 2), (9, 9), (2, 1), (10, 7)]
    for context in contexts:
        grams = ngram.pack(np.array([[*context, word] for word in range(11)]).reshape(-1), 3, model.bits, 0)[2::3]
        found = ngram.probabilities(model, grams)
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(found, [direct(context, word) for word in range(11)], rtol=1e-12)


def test_ngram_sums_to_one_where_counts_are_too_few_for_discounts():
    model = ngram.fit(np.array([1, 2, 1, 3], np.uint16), vocab_size=7, order=5, before=0)
    grams = ngram.pack(np.array([[1, 2, 1, 3, word] for word in range(7)]).reshape(-1), 5, model.bits, 0)[4::5]
    assert ngram.probabilities(model, grams).sum() == pytest.approx(1.0, abs=1e-12)


def test_ngram_refuses_what_does_not_fit_into_64_bits():
    with pytest.raises(UsageError, match="lower order"):
        ngram.fit(np.arange(10), vocab_size=50_000, order=5, before=0)
