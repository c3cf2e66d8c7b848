"""Filters: the moving average against its recursion."""

import numpy as np

from et_jax.control.smoothing import ema_entropy


def test_ema_starts_at_the_first_entropy_and_forgets_geometrically(signals, state, run):
    law, h = ema_entropy(0.8), np.array([4.0, 1.0, 0.0, 2.5])
    got = run(law, state(law, entropy=9.0), signals(entropy=h, generated=np.arange(1, 5))).entropy
    expected = [4.0, 3.4, 2.72, 2.676]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
