"""What every kernel's tests share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _interpreters_are_hardly_optimised(hardly_optimised):
    """The tests prove what a kernel computes; the code that a CPU gets for an interpreter is no part of that."""
