"""What programs took: each second counted once, whatever was traced within what."""

import time

import jax
import jax.numpy as jnp
import pytest

from et_jax.serve.compilation import Made, made

_TRACED = "/jax/core/compile/jaxpr_trace_duration"


def test_a_trace_within_another_is_counted_once():
    before = made()
    jax.monitoring.record_event_duration_secs(_TRACED, 3.0)
    jax.monitoring.record_event_duration_secs(_TRACED, 2.0)  # began later and ended later: another one
    jax.monitoring.record_event_duration_secs(_TRACED, 7.0)  # began before both
    assert (made() - before).tracing == pytest.approx(7.0, abs=0.1)
    time.sleep(0.01)
    jax.monitoring.record_event_duration_secs(_TRACED, 0.001)
    assert (made() - before).tracing == pytest.approx(7.001, abs=0.1)


def test_a_program_is_counted_with_what_it_took():
    before = made()
    jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7))
    told = made() - before
    assert told.programs >= 1 and told.tracing > 0 and told.compiling + told.loading > 0
    assert str(Made(programs=2, tracing=1.25, compiling=2.0, loading=0.0)) == (
        "2 programs ready: 1.2 s tracing, 2.0 s compiling, 0.0 s loading"
    )
