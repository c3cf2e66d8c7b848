"""A start loads what the last one with the same settings noted, before its key is known."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.decode.decoder import Program
from et_jax.io import own_sources
from et_jax.serve.config import EngineConfig
from et_jax.serve.programs import compilation, preload
from et_jax.serve.programs.executables import CachedProgram


def test_a_start_begins_with_the_programs_that_the_last_one_noted(unset, tmp_path, monkeypatch):
    monkeypatch.setattr(own_sources, "IMPORTED", time.time() + 1e6)
    monkeypatch.setattr(preload, "_LARGE", 0)
    assert compilation.cache_programs(tmp_path / "programs") is None
    loaded, read = [], preload._read
    monkeypatch.setattr(preload, "_read", lambda *given: (loaded.append(given[1]), read(*given))[1])
    numbers = jax.device_put(np.linspace(-2.0, 3.0, 8, dtype=np.float32), jax.devices()[0])

    def start(settings: EngineConfig) -> tuple[int, list[str], bytes]:
        """Start as a process does; return the programs begun, those loaded in all, and every bit of the result."""
        jax.clear_caches()
        loaded.clear()
        preload.begin(settings)
        begun = len(preload._begun)
        found = CachedProgram(Program(jax.jit(lambda x: jnp.sin(x) ** 3)), "step", "a configuration")(numbers)
        preload.end(settings)
        return begun, [*loaded], np.asarray(found).tobytes()

    settings, other = EngineConfig(name="bundled-small"), EngineConfig(name="bundled")
    compiled, again = start(settings), start(settings)
    assert compiled[:2] == (0, [])
    assert again[0] == len(again[1]) == 1 and again[2] == compiled[2]  # loaded once, ahead
    assert [start(each)[0] for each in (other, settings, other)] == [0, 1, 1]
    preload.begin(settings)
    preload.end(settings)  # it used nothing
    assert start(settings)[0] == 0
    own_sources.digest.cache_clear()
