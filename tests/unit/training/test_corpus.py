"""The corpus: the split, the texts, the order of the rows."""

import itertools

import numpy as np
from small_runs import WINDOW

from et_jax.training import corpus


def test_split_holds_out_whole_works_and_the_same_ones_every_time(archive):
    names = list(corpus.read_works(archive))
    train, held_out = corpus.split(names, 0.2)
    assert set(train) | set(held_out) == set(names)
    assert not set(train) & set(held_out)
    assert len(held_out) == 2
    assert corpus.split(reversed(names), 0.2) == (train, held_out)
    assert train != sorted(names)[: len(train)]  # chosen by hash, not by name


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


def test_rows_of_a_step_are_the_same_tokens_whatever_their_length_and_held_out_ones_all_of_them(data):
    _, train, held_out = data
    asked = {"seed": 0, "step": 70, "num_windows": 4, "window": WINDOW}
    long, short = (corpus.training_rows(train, length=length, **asked) for length in (WINDOW, 8))
    assert np.array_equal(long.targets.reshape(-1), short.targets.reshape(-1))
    for rows in (long, short):
        assert (rows.inputs[:, 0] == corpus.END_ID).all()
        assert np.array_equal(rows.inputs[:, 1:], rows.targets[:, :-1])
    rows = corpus.held_out_rows(held_out, 32)
    assert np.array_equal(rows.targets[rows.target_mask], held_out.ids)
