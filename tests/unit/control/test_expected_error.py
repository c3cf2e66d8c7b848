"""Reading by expected error: the formula, and what the selector leaves unread."""

import jax
import jax.numpy as jnp
import numpy as np
from drawn_blocks import Blocks, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.bounds import Interval
from et_jax.control.expected_error import ExpectedError, squared_error
from et_jax.types import replace

choose = jax.jit(ExpectedError().choose)


def seen(b, sensitivity):
    """The view with masses known to `apart`, half of it either way, and heads of different sensitivity."""
    exact, apart = jnp.asarray(b.log_mass, jnp.float32), jnp.linspace(0.0, 0.5, b.log_mass.shape[1])
    coded = Interval(low=exact - apart, high=exact + apart)
    return replace(b.view, coded=coded, sensitivity=jnp.asarray(sensitivity, jnp.float32))


@settings(max_examples=60, deadline=None)
@given(drawn(spread=20.0, tolerance=(1e-4, 2.0)), st.sampled_from([(0.5, 2.0), (1.0, 0.0), (0.0, 0.0)]))
def test_the_fewest_blocks_are_opened_that_leave_no_head_more_than_its_share(b: Blocks, sensitivity):
    """A block errs by a^2 r^2 2 J / n, J the nats that Jensen's inequality leaves open, in float64 by the formula."""
    view = seen(b, sensitivity)
    n = np.maximum(np.asarray(b.view.num_tokens, np.float64), 1)
    log_mass, middle = (np.where(b.held, x, 0) for x in (b.log_mass, np.asarray(b.view.middle, np.float64)))
    share = np.exp(b.log_mass - np.logaddexp.reduce(b.log_mass, axis=-1, keepdims=True))
    uneven = np.clip(2 * (log_mass - np.log(n) - middle) / n, 0, 1)
    error = np.where(b.held, share**2 * uneven * np.where(b.held, np.asarray(b.view.value_radius), 0) ** 2, 0.0)
    found = np.asarray(squared_error(view), np.float64)
    np.testing.assert_allclose(found, error, rtol=2e-3, atol=1e-5)
    chosen = choose(view)
    b.assert_fewest(chosen.opened, np.array(sensitivity)[:, None] * found)
    assert np.all(np.asarray(chosen.upper)[:, b.held] >= b.log_mass[:, b.held])
