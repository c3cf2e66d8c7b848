"""Threads that make for later what a process can do without, so that its end need not wait for them."""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_NAME = "et_jax later"


def worker() -> ThreadPoolExecutor:
    """Return an executor of one thread for such work. A process that ends in the usual way waits for it."""
    return ThreadPoolExecutor(1, thread_name_prefix=_NAME)


def leave(code: int) -> None:
    """End the process with an exit code, at once where such a thread is at work: what it makes is lost."""
    if any(thread.name.startswith(_NAME) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a reader that is gone, or no stream at all
                stream.flush()
        os._exit(code)
    sys.exit(code)
