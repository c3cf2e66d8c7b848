"""What is asked for once or not at all: nothing of it is worked out where it is not."""

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.once import run_if


def test_it_runs_where_it_is_asked_for_and_no_work_leaves_the_loop():
    def sorted_once(asked, given):
        return run_if(asked, lambda carry, given: carry + jnp.sort(given), jnp.ones(8), given)

    def looped(asked, given):
        return jax.lax.fori_loop(0, asked.astype(jnp.int32), lambda _, x: x + jnp.sort(given), jnp.ones(8))

    given = jnp.arange(8.0)[::-1]
    np.testing.assert_array_equal(sorted_once(jnp.bool_(True), given), 1 + np.arange(8))
    np.testing.assert_array_equal(sorted_once(jnp.bool_(False), given), np.ones(8))

    def entry(function) -> str:
        text = jax.jit(function).lower(jnp.bool_(False), jnp.arange(8.0)).compile().as_text() or ""
        assert "sort(" in text
        return text.split("ENTRY ")[1]

    assert "sort(" in entry(looped)  # XLA takes it out of a plain loop
    assert "sort(" not in entry(sorted_once)
