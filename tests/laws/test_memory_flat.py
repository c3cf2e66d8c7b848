"""No memory is kept: arrays on the device are as many after the third wave of requests as after the second."""

import gc

import jax


def test_nothing_piles_up(served):
    model, counts = served.anew(preempt_every=3), []
    for _ in range(3):
        done = model.generate(served.requests[2:6])  # one of several continuations, one with stops, two with penalties
        assert all(one.error is None for one in done)
        del done
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[2] <= counts[1]
