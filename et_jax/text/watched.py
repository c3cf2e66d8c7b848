"""Runs a worker's program, the first argument, and ends when the process of the second argument ends.

A closed pipe is noticed only by a program that reads it, and this one may be busy with a question. It imports
nothing of this package.
"""

import os
import runpy
import sys
import threading
import time

EVERY = 0.2  # seconds between two checks


def watch(process: int) -> None:
    """End this process when `process` is no longer its parent, whatever the main thread does."""
    while os.getppid() == process:
        time.sleep(EVERY)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(int(sys.argv[2]),), daemon=True).start()
    runpy.run_path(sys.argv[1], run_name="__main__")
