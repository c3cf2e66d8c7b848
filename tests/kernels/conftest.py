"""Fixtures that every kernel's tests share: kernels broken on purpose."""

import functools

import pytest
from absent_gpu import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from ladder import compiled

from et_jax.pallas import ring


@pytest.fixture(scope="module", autouse=True)
def _interpreters_are_hardly_optimised(hardly_optimised):
    """The tests prove what a kernel computes; the code that a CPU gets for an interpreter is no part of that."""


class Broken:
    """A copy with something wrong in it."""

    def __init__(self, copy, start=None, wait=None):
        self.start, self.wait = start or copy.start, wait or copy.wait


@pytest.fixture(params=["missing wait", "wrong page"])
def broken_ring(request, monkeypatch):
    """The copies of a TPU kernel, none of which is waited for, or each of which brings the first head's page 1."""
    copy = pltpu.make_async_copy

    def unawaited(*refs):
        return Broken(copy(*refs), wait=lambda: None)

    def astray(source, *refs):
        return Broken(copy(source, *refs), start=copy(source.ref.at[0, 1], *refs).start)

    compiled.cache_clear()
    monkeypatch.setattr(ring.pltpu, "make_async_copy", {"missing wait": unawaited, "wrong page": astray}[request.param])
    yield
    compiled.cache_clear()


@pytest.fixture
def broken_gpu(monkeypatch):
    """Replace a primitive of a Hopper kernel; the simulation starts afresh after the failure."""
    compiled.cache_clear()
    yield functools.partial(monkeypatch.setattr, plgpu)
    compiled.cache_clear()
    reset_gpu_interpret_mode_state()
