"""What programs took: each second counted once, whatever was traced within what."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from et_jax.serve.programs.compilation import made

_TRACED = "/jax/core/compile/jaxpr_trace_duration"


def traced(*durations: float) -> float:
    """The seconds of tracing that are counted where traces of these durations end, in a thread that traced nothing."""

    def end() -> None:
        for duration in durations:
            jax.monitoring.record_event_duration_secs(_TRACED, duration)

    before = made()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(end).result()
    return (made() - before).tracing


def test_a_trace_within_another_is_counted_once():
    """The longest ends last, and so began before the others, which are within it."""
    assert traced(3.0, 2.0, 7.0) == pytest.approx(7.0, abs=0.1)
    assert traced(7.0, 3.0) == pytest.approx(10.0, abs=0.1)
