"""A model of two slots, loaded once for all tests of this folder that ask for it."""

import pytest
from hurry import hurried
from reopened import TWO_SLOTS

from et_jax.serve import engine


@pytest.fixture(scope="session")
def two_slots():
    """The small bundled model in two slots, hardly optimised. Tests that change anything serve by a `reopened` one."""
    with hurried():
        return engine.load(**TWO_SLOTS)
