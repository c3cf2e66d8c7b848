"""What JAX has got wrong on CPUs in versions next to those that are allowed, in a process that it may end.

A version that fails here is left out of those in pyproject.toml.
"""

import os
import subprocess
import sys

PROGRAMS = """
import jax, jax.numpy as jnp, numpy as np
drawn = np.random.default_rng(0).random
def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-4)

# Ended the process or ran for ever on some processors: 0.10.2 and 0.11.0, https://github.com/jax-ml/jax/issues/39257
print("a sum of products of rank 8", flush=True)
a, b = drawn((10, 4, 6)), drawn((10, 4, 6, 9, 9, 9, 9, 9), np.float32)
wide = lambda a, b: (a.reshape(10, 4, 6, 1, 1, 1, 1, 1) * b).sum(2)
close(jax.jit(wide)(a.astype(np.float32), b), np.einsum("ijk,ijkabcde->ijabcde", a, b))

# Ended the process: 0.10.2, https://github.com/jax-ml/jax/issues/40412
print("a sum of products of rank 7, one axis of size 1", flush=True)
a, b = drawn((2, 3, 1, 2, 2, 8, 8, 8), np.float32)
close(jax.jit(lambda a, b: (a * b).sum(3))(a, b), (a.astype(float) * b).sum(3))

# Left out a part of the sum: 0.10.2, https://github.com/jax-ml/jax/issues/39103
print("products of many rows, squared and summed", flush=True)
x, w = drawn((40_000, 3)), drawn((3, 3))
norms = lambda x, w: jax.vmap(lambda row: jnp.square(w @ row).sum())(x)
given = x.astype(np.float32), w.astype(np.float32)
close(jax.jit(norms)(*given), np.square(x @ w.T).sum(1))
close(jax.jit(jax.grad(lambda *given: norms(*given).sum(), argnums=1))(*given), 2 * w @ x.T @ x)

# Wrote the whole array at each turn, here for an hour: 0.11.1, https://github.com/jax-ml/jax/issues/40101
print("a number written at each turn of a long loop", flush=True)
turns = 8_000_000
halved = lambda i, past: past.at[i + 1].set(past[i] * 0.5 + 1)
close(jax.jit(lambda: jax.lax.fori_loop(0, turns - 1, halved, jnp.zeros(turns)))()[-3:], 2)
"""


def test_jax_computes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:]
