"""A plugin of pytest that records which functions of the package each test enters, for `scripts/plant_faults.py`."""

import json
import os
import sys
import time
from pathlib import Path
from types import CodeType

import pytest

_TOOL = 4  # of sys.monitoring: no profiler or debugger has this number
_ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_PACKAGE = f"{_ROOT}et_jax{os.sep}"
_entered: set[tuple[str, str]] = set()


def _record(code: CodeType, _: int) -> object:
    if code.co_filename.startswith(_PACKAGE):
        name = code.co_qualname.replace(".<locals>", "")
        _entered.add((code.co_filename.removeprefix(_ROOT), name))
    return sys.monitoring.DISABLE  # once for each test is enough


sys.monitoring.use_tool_id(_TOOL, "entered")
sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, _record)
sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    _entered.clear()
    sys.monitoring.restart_events()
    begun = time.process_time()
    yield
    row = {"test": item.nodeid, "seconds": time.process_time() - begun, "entered": sorted(_entered)}
    with (Path(os.environ["ENTERED"]) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
