"""What tests of compiled programs on disk share."""

import jax
import pytest
from jax._src import compilation_cache as of_jax
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def unset(monkeypatch):
    """A JAX that keeps programs nowhere yet."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(of_jax, "get_file_cache", of_jax.get_file_cache)  # put back afterwards
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
