"""Memory balances: the pool's count of pages is the device's, every page comes back, and arrays do not accumulate."""

import gc
import itertools

import jax
from served import assert_balanced


def test_the_pool_agrees_with_the_device_between_bursts(served, monkeypatch):
    busy, rounds = served.anew(preempt_every=3), 0
    [replica] = busy.replicas().replicas
    advance = replica.advance

    def advance_and_compare():
        nonlocal rounds
        advance()
        if replica.bursts.in_flight:
            return
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


def test_nothing_piles_up(served):
    """Arrays on the device are as many after the third wave of requests as after the second."""
    model, counts = served.anew(preempt_every=3), []
    for _ in range(3):
        done = model.generate(served.requests[2:6])  # one of several continuations, one with stops, two with penalties
        assert all(one.error is None for one in done)
        del done
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[2] <= counts[1]
