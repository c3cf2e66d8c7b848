"""What every test shares: strict dtype promotion, repeatable examples, compiled programs, and the data folder.

Compiled programs outlive a clone: they are kept in `~/.cache/et_jax/tests`, up to 4 GB for each version of jaxlib, by
keys in which JAX names the processor. ET_JAX_TEST_CACHE names another folder; `off` gives the run an empty one.
"""

import ctypes
import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jaxtyping
import pytest
from hurry import hurried
from jaxlib import version
from places import SHARED

# A silent float32 next to a bfloat16 is an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run and nothing kept between runs; the first example of many compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Tracing makes many objects and few cycles. Python's own thresholds cost about 7% of the CPU time of the tests.
gc.set_threshold(100_000, 50, 100)


SLOW = Path(__file__).parent / "slow"
# Begun first, though they have few tests: a long file that is begun last leaves the other processes idle.
LONG = {
    *("test_readme.py", "test_experiments.py", "test_ray.py"),
    *("test_kept_programs.py", "test_abandoned.py", "test_stacked.py"),
    *("test_drafts.py", "test_request_control.py", "test_loop.py", "test_killed.py"),
}


def _catch_ignored_signals() -> None:
    """Replace the ignored signals of a background job by a handler that does nothing, which no child inherits."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """Name the folder of compiled programs for this process and its children, which heed signals as usual."""
    _catch_ignored_signals()
    if config.option.markexpr.startswith("devices"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        chosen = os.environ.get("ET_JAX_TEST_CACHE") or "~/.cache/et_jax/tests"
        if chosen == "off":
            empty = tempfile.TemporaryDirectory(prefix="et_jax_tests_", ignore_cleanup_errors=True)
            config.add_cleanup(empty.cleanup)
            chosen = empty.name
        settings = {
            "jax_compilation_cache_dir": str(Path(chosen).expanduser().resolve() / f"jaxlib-{version.__version__}"),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        os.environ |= {name.upper(): str(value) for name, value in settings.items()}


def pytest_sessionstart() -> None:
    """Have the package promote strictly within its own settings too, and keep programs as it does for its users."""
    from et_jax import scope  # not before the shapes of its signatures are checked
    from et_jax.serve.programs import store as program_store

    scope.SETTINGS["numpy_dtype_promotion"] = "strict"
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    program_store.use(folder)


def scope_of(nodeid: str) -> str:
    """Return what stays in one process, which makes its models once: a test file, or a capability with all laws."""
    file, _, test = nodeid.partition("::")
    return test[test.index("[") :] if file.startswith("tests/laws/") and "[" in test else file


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark what lies in `slow`; of what is chosen put first what takes long, then what has the most tests."""
    for item in items:
        if item.path.is_relative_to(SLOW):
            item.add_marker(pytest.mark.slow)
    yield
    count = Counter(scope_of(item.nodeid) for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -count[scope_of(item.nodeid)]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let processes take scopes in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Together(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_end_with_their_module():
    """Each program maps about ten pieces of memory on a CPU, and a process has 65,530 by default on Linux.

    glibc keeps what compilers free, gigabytes in a long run: it is asked to give that back.
    """
    yield
    jax.clear_caches()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture(scope="module")
def hardly_optimised():
    """Compile in a hurry, here and in commands: for programs that take longer to compile well than to run.

    The tests of a step, of a replica and of all arithmetic compile as is served.
    """
    with hurried():
        yield


@pytest.fixture
def as_users_have_it():
    """Without the run-time type checks of the test run, which would answer before the code does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real weights, text and prompts: ET_JAX_SHARED, or `shared` beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"no data folder at {SHARED}; set ET_JAX_SHARED to the folder that holds models/ and text/")
    return SHARED
