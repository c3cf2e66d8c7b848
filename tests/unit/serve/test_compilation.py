"""What programs took: each second counted once, whatever was traced within what."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from et_jax.serve.compilation import Made, made

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


def test_a_program_is_counted_with_what_it_took():
    before = made()
    jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7))
    told = made() - before
    assert told.programs >= 1 and told.tracing > 0 and told.compiling + told.loading > 0
    assert str(Made(programs=2, tracing=1.25, compiling=2.0, loading=0.0)) == (
        "2 programs ready: 1.2 s tracing, 2.0 s compiling, 0.0 s loading."
    )
