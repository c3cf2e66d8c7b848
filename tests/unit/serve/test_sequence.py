"""A sequence from its first token to its completion: pieces add up, every end has its reason, counts follow tokens."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_sequences import row, sequence, tokenizer

from et_jax.errors import UsageError
from et_jax.serve.sequence import Sequence, Status
from et_jax.text import Grammar, Grammars
from et_jax.text.grammar import Matcher

WORDS = "It was in the spring of that year that the café by the river was let \N{SNOWMAN} again."


def ids(text: str = WORDS) -> list[int]:
    return tokenizer().encode(text)[len(tokenizer().encode("")) :]


def played(one: Sequence, tokens: list[int]) -> list:
    """Give a sequence tokens until it ends or they are used up, and return its events."""
    events = []
    for number, token in enumerate(tokens, 1):
        events.append(one.take(row(token), number == one.limit or token in one.stop_ids))
        if events[-1].completion is not None:
            break
    return events


@given(st.integers(1, 30), st.lists(st.text("aeht rs", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop_string(limit, stops):
    tokens = ids()[:limit]
    one = sequence([5, 6], limit=len(tokens), stop=tuple(stops))
    events = played(one, tokens)
    done = events[-1].completion
    whole = tokenizer().decode(list(done.token_ids))
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    assert done.finish_reason == ("stop" if ends else "length")
    assert "".join(event.text for event in events) == done.text == "".join(each.text for each in done.trace)
    if ends:
        first = min(ends)
        assert done.text in {whole[: first - len(stop)] for stop in stops if whole[:first].endswith(stop)}
        assert all(stop not in done.text for stop in stops)
    else:
        assert done.text == whole and list(done.token_ids) == tokens
    assert [event.completion is None for event in events] == [True] * (len(events) - 1) + [False]
    assert {(event.prompt_index, event.index) for event in events} == {(3, 1)}
    assert (done.index, done.prompt_tokens) == (1, 2) and events[-1].trace == done.trace[-1]
    assert all(event.trace is not None for event in events) and one.status is Status.FINISHED


@given(st.integers(1, 20), st.integers(0, 19))
def test_tokens_are_counted_of_prompt_and_text_and_the_last_is_never_written(limit, taken):
    one = sequence(list(range(5, 12)), limit=limit)
    played(one, ids()[: min(taken, limit - 1)])
    assert one.num_tokens == 7 + min(taken, limit - 1)
    assert one.most_written == 7 + limit - 1 >= one.num_tokens - 1


def test_a_text_ends_with_its_grammar_or_its_last_token_and_no_token_comes_that_may_not():
    grammar = Grammar("choice", json.dumps([WORDS, "no"]))

    every = np.full(128, 0xFFFFFFFF, np.uint32)

    def under(grammar: Grammar, limit: int) -> tuple[Sequence, Matcher]:
        one = sequence([5], limit=limit)
        one.matcher = Grammars(tokenizer(), 4096).matcher(grammar, every, forces=True)
        return one, one.matcher

    for limit, reason in ((99, "stop"), (len(ids()), "stop"), (len(ids()) - 1, "length")):
        (one, matcher), events = under(grammar, limit), []
        while one.status is not Status.FINISHED and len(events) < len(ids()):
            forced, _ = matcher.ahead(4)
            for token in ids()[len(events) :][: 1 + len(forced)]:
                events.append(one.take(row(token), len(events) + 1 == limit))
                if events[-1].completion is not None:
                    break
        done = events[-1].completion
        assert done is not None and (done.finish_reason, done.token_ids) == (reason, tuple(ids()[:limit]))
    with pytest.raises(UsageError, match="The grammar allows no continuation"):
        under(grammar, 9)[0].take(row(ids("7")[0]), False)
    one, matcher = under(Grammar("choice", '["yes"]'), 9)
    matcher.ahead(4)
    with pytest.raises(UsageError, match="came where the grammar forces"):
        one.take(row(ids("no")[0]), False)


def test_what_was_held_back_is_shown_at_the_end_and_not_after_a_failure():
    tokens = ids("It was so")
    beginning = tokenizer().decode(tokens)
    ended, failed = (sequence([5], limit=99, stop=(beginning + "!",)) for _ in range(2))
    assert [event.text for event in played(ended, tokens)] == [""] * len(tokens)  # all may become the stop string
    end = ended.end("abort")
    assert end.completion is not None and end.text == beginning == end.completion.text and end.trace is None
    assert end.completion.trace[-1].text == beginning
    played(failed, tokens)
    fault = failed.fail("torn").completion
    assert fault is not None and (fault.finish_reason, fault.error, fault.text) == ("error", "torn", "")
    assert list(fault.token_ids) == tokens
