"""Models of two slots and of six, loaded once for all tests of this folder that ask for them."""

import pytest
from hurry import hurried
from reopened import SIZES, TWO_SLOTS

from et_jax.serve import engine


@pytest.fixture(scope="session")
def two_slots():
    """The small bundled model in two slots, hardly optimised. Tests that change anything serve by a `reopened` one."""
    with hurried():
        return engine.load(**TWO_SLOTS)


@pytest.fixture(scope="session")
def six_slots():
    """The small bundled model in six slots, of which four advance, likewise."""
    with hurried():
        return engine.load(**SIZES)
