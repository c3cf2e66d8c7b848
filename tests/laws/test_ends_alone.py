"""What ends one sequence, a failure or its caller, leaves the others every bit."""

from served import assert_balanced, bits

from et_jax.serve.sequence import Sequence


def test_what_fails_on_the_host_for_one_request_ends_that_one(served, monkeypatch):
    busy, taken, marked = served.anew(), Sequence.take, served.requests[1]

    def fragile(sequence, row, finished):
        if sequence.request is marked and len(sequence.trace) == 3:
            raise LookupError("torn")
        return taken(sequence, row, finished)

    monkeypatch.setattr(Sequence, "take", fragile)
    done = busy.generate(served.requests)
    torn = done.pop(1)
    expected = [*served.alone[:1], *served.alone[2:]]
    assert torn.finish_reason == "error" and "torn" in str(torn.error) and len(torn.token_ids) == 3
    assert torn.token_ids == served.alone[1].token_ids[:3]
    assert bits(done) == bits(expected)
    assert_balanced(busy)


def test_what_is_cancelled_ends_with_what_it_has_and_its_neighbours_do_not_notice(served):
    busy = served.anew()
    neighbour = busy.stream(served.requests[5])
    first, seen = next(neighbour), []
    for event in busy.stream(served.requests[:5], cancelled=lambda: len(seen) >= 9):
        seen.append(event)
    ended = {(e.prompt_index, e.index): e.completion for e in seen if e.completion}
    keys = [(number, index) for number, asked in enumerate(served.requests) for index in range(asked.params.n)]
    expected = dict(zip(keys, served.alone, strict=True))
    assert len(ended) == 6 and "abort" in {one.finish_reason for one in ended.values()}
    for key, one in ended.items():
        assert one.token_ids == expected[key].token_ids[: len(one.token_ids)]
    [whole] = [event.completion for event in [first, *neighbour] if event.completion]
    assert bits([whole]) == bits([expected[5, 0]])
    assert_balanced(busy)
