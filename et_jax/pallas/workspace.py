"""The temporaries of attention, so that memory planning need not know the kernels' settings."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes of a call's temporaries, an upper estimate: those of the path without a kernel, which are the largest.

    scores: of the queries walked together against a group of tokens, before and after the exponential.
    gathered: keys and values of such a group, copied from the pool.
    """

    scores: int
    gathered: int
