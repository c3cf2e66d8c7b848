"""What attention sets aside while it runs, so that a plan of memory need know no kernel's tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes of a call's temporaries, an upper estimate: those of the path without a kernel, which needs the most.

    scores: of the queries walked together against a group of tokens, before and after the exponential.
    gathered: keys and values of such a group, copied out of the pool.
    """

    scores: int
    gathered: int
