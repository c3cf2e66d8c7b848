"""The program that runs a worker's program, its first argument, and ends with the process that is its second.

A pipe that closes says the same, but only to a program that reads it: this one may be at work on a question. It imports
nothing of this package.
"""

import os
import runpy
import sys
import threading
import time

EVERY = 0.2  # seconds between two looks


def watch(process: int) -> None:
    """End this process when `process` is no longer its parent, whatever the main thread is at."""
    while os.getppid() == process:
        time.sleep(EVERY)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(int(sys.argv[2]),), daemon=True).start()
    runpy.run_path(sys.argv[1], run_name="__main__")
