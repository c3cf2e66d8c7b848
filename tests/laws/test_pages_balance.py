"""Pages balance: the pool's count is the device's after every round, and every page comes back."""

import itertools

from served import assert_balanced


def test_the_pool_agrees_with_the_device_after_every_round(served, monkeypatch):
    busy, rounds = served.anew(preempt_every=3), 0
    [replica] = busy.replicas().replicas
    advance = replica.advance

    def advance_and_compare():
        nonlocal rounds
        advance()
        rounds += 1
        assert replica.pool.num_free == int(replica.device.state.table.num_free)

    monkeypatch.setattr(replica, "advance", advance_and_compare)
    busy.generate(served.requests)
    assert rounds > 10
    assert_balanced(busy)


def test_streams_that_are_left_give_every_page_back(served):
    busy = served.anew()
    for count in (1, 5, 20):
        stream = busy.stream(served.requests)
        list(itertools.islice(stream, count))
        stream.close()
    busy.generate(served.requests[0])
    assert_balanced(busy)
