"""Optional background threads: the process waits at its end only for work whose result lasts."""

import contextlib
import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_PASSING, _LASTING = "et_jax passing", "et_jax lasting"
_WAITING = "The program that drafts is being compiled for the next start; Ctrl-C leaves without it."


def worker(*, lasting: bool) -> ThreadPoolExecutor:
    """Return an executor of one thread for such work, `lasting` if a later process can use the result."""
    return ThreadPoolExecutor(1, thread_name_prefix=_LASTING if lasting else _PASSING)


def leave(code: int) -> None:
    """End the process with an exit code: at once, except for lasting work."""
    at_work = [thread.name for thread in threading.enumerate()]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, or no stream at all
        sys.stdout.flush()
    if any(name.startswith(_LASTING) for name in at_work):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(_WAITING, file=sys.stderr)
    elif any(name.startswith(_PASSING) for name in at_work):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # or the interpreter searches all objects for cycles, which takes up to 0.7 s
    sys.exit(code)
