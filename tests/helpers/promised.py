"""A program of paper, for tests of which program runs and when it is made."""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp

from et_jax.decode.decoder import Program
from et_jax.decode.packed import Packed
from et_jax.serve.programs.executables import CachedProgram


class Promised(CachedProgram):
    """Is made once `go` is set, or fails to be; with `kept` an earlier process has kept it. Its output is its own."""

    def __init__(
        self, name: str, *, go: threading.Event | None = None, kept: bool = True, failure: Exception | None = None
    ) -> None:
        super().__init__(Program(jax.jit(lambda: None)), name, "")
        self.name, self.kept, self.failure = name, kept, failure
        self.go = threading.Event() if go is None else go
        self.num_asked, self.num_made, self.made_for = 0, 0, ()
        self.output = Packed(words=jnp.zeros((1, 1, 1), jnp.uint32), tree=None, shapes=(), dtypes=())

    def __call__(self, weights: Any, state: Any, num_steps: Any, until_end: Any) -> Any:
        return state, self.output

    def is_cached(self, *arguments: Any) -> bool:
        self.num_asked += 1
        return self.kept

    def ahead(self, *arguments: Any) -> Any:
        def make() -> None:
            assert self.go.wait(60)
            self.num_made, self.made_for = self.num_made + 1, arguments
            if self.failure is not None:
                raise self.failure
            self._ready = {"as asked": cast(Any, None)}

        return make
