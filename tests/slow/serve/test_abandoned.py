"""Streams that nobody closes: the garbage collector ends them, in whatever thread it runs, without a lock."""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import threading
from typing import Any, ClassVar

import pytest
from reopened import reopened

from et_jax.serve import engine
from et_jax.serve.replicas import Replicas
from et_jax.serve.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SETTINGS = {"max_num_seqs": 2, "max_model_len": 96, "prefill_batch": 32}
PROMPTS = ["It was", "The sea", "In the year 1801 the old king"]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=3, temperature=0.9)


class Watched:
    """A lock that notes whether it was asked for while its thread collected garbage, and then refuses."""

    collecting = threading.local()
    asked: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        if getattr(self.collecting, "now", False):
            self.asked.append(threading.current_thread().name)
            raise RuntimeError("a finaliser asks for a lock")
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Canary:
    """Notes the thread in which it is collected."""

    def __init__(self, died: list[str]) -> None:
        self.died = died

    def __del__(self) -> None:
        self.died.append(threading.current_thread().name)


@pytest.fixture(scope="module")
def model():
    return engine.load(**SETTINGS)


@pytest.fixture(scope="module")
def served(model):
    """Two replicas, all of whose locks are watched."""

    def note(phase: str, _: object) -> None:
        Watched.collecting.now = phase == "start"

    own = reopened(model, replicas=2)
    replicas: Any = own.replicas()
    replicas.queue.lock = Watched()
    for replica in replicas.replicas:
        replica.lock = Watched()
    gc.callbacks.append(note)
    yield own
    gc.callbacks.remove(note)
    assert not Watched.asked


@pytest.fixture(scope="module")
def texts(served):
    return [list(done.token_ids) for done in served.generate(PROMPTS, PARAMS)]


@contextlib.contextmanager
def collector(every: int, threads: str):
    """Collect garbage at every so many calls of functions in threads of a kind, and at no other time."""
    calls = 0

    def profile(*_):
        nonlocal calls
        calls += 1
        if calls % every == 0 and threading.current_thread().name.startswith(threads):
            gc.collect()

    gc.collect()
    gc.freeze()  # or each of thousands of collections would walk over all that JAX has imported
    gc.disable()
    threading.setprofile_all_threads(profile)
    try:
        yield
    finally:
        threading.setprofile_all_threads(None)
        gc.enable()
        gc.unfreeze()
        gc.collect()


def drop(model, died: list[str]) -> None:
    """Leave a stream under way in a cycle with the exception that ended its loop."""
    canary = Canary(died)
    stream = model.stream(PROMPTS * 2, max_tokens=60, ignore_eos=True)
    try:
        for _ in stream:
            raise ValueError("the caller's own")
    except ValueError as error:
        kept = error, canary  # noqa: F841


def assert_nothing_is_left(model) -> None:
    replicas = model.replicas()
    assert replicas.idle
    replicas.forget_prefixes()
    for replica in replicas.replicas:
        free = int(replica.device.state.table.num_free)
        assert free == replica.pool.num_free == model.decoder_config.num_pages - 1


async def read_all(model) -> list[list[int]]:
    async def read(prompt: str) -> list[int]:
        events = [event async for event in model.stream_async(prompt, PARAMS)]
        return list(events[-1].completion.token_ids)

    return await asyncio.gather(*map(read, PROMPTS))


@pytest.mark.parametrize("threads", ["MainThread", "et_jax", "asyncio"])
def test_a_stream_collected_in_a_thread_of_any_kind_takes_no_lock(served, texts, threads):
    died: list[str] = []
    aborted = served.metrics.finished.get("abort", 0)
    with collector(50, threads):
        drop(served, died)
        got = asyncio.run(read_all(served))
    assert len(died) == 1 and died[0].startswith(threads) and not Watched.asked
    assert got == texts
    assert_nothing_is_left(served)
    assert served.metrics.finished["abort"] == aborted + 2 * len(PROMPTS)


def test_streams_dropped_again_and_again_stop_nobody(served, texts):
    died: list[str] = []
    times, before = 200, gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10)
    try:
        for number in range(times):
            drop(served, died)
            assert [list(done.token_ids) for done in served.generate(PROMPTS, PARAMS)] == texts, number
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    gc.collect()
    assert len(died) == times
    assert_nothing_is_left(served)


def test_garbage_collected_in_every_thread_at_every_round_changes_nothing(served, texts, monkeypatch):
    died: list[str] = []
    for replica in served.replicas().replicas:
        fetched = replica._fetched

        def collecting(tree, fetched=fetched):
            gc.collect()
            return fetched(tree)

        monkeypatch.setattr(replica, "_fetched", collecting)
    with collector(500, ""):
        for _ in range(3):
            drop(served, died)
            assert [list(done.token_ids) for done in served.generate(PROMPTS, PARAMS)] == texts
    assert len(died) == 3 and not Watched.asked
    assert_nothing_is_left(served)


def test_what_was_dropped_under_another_control_does_not_stay(model, monkeypatch):
    own = reopened(model)
    stream = own.stream(PROMPTS, max_tokens=60, ignore_eos=True)
    next(stream)
    del stream
    monkeypatch.setattr(Replicas, "warm_up", lambda *_: None)
    own.replicas("paper")
    assert len(own._replicas) == 1 and own.metrics.finished == {"abort": len(PROMPTS)}


@pytest.mark.parametrize("end", ["aclose", "dropped", "loop closed", "cancelled", "cancelled twice", "run over"])
def test_an_asyncio_stream_that_is_left_in_any_way_leaves_nothing(model, texts, end, recwarn):
    served = reopened(model)
    complaints: list[object] = []

    async def begin():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        stream = served.stream_async(PROMPTS, max_tokens=60, ignore_eos=True)
        await anext(stream)
        return stream

    async def consume(stream) -> None:
        async for _ in stream:
            pass

    async def leave():
        stream = await begin()
        if end == "aclose":
            await stream.aclose()
        elif end.startswith("cancelled"):
            task = asyncio.create_task(consume(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            if end == "cancelled twice":
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif end == "run over":
            asyncio.create_task(consume(stream))  # noqa: RUF006
            await asyncio.sleep(0.01)

    if end == "loop closed":
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(begin())
        loop.close()
        del stream
    else:
        asyncio.run(leave())
    gc.collect()
    assert [list(done.token_ids) for done in served.generate(PROMPTS, PARAMS)] == texts
    assert_nothing_is_left(served)
    assert not complaints and not recwarn.list


def test_a_model_collected_in_a_round_of_its_own_replica_ends_its_threads(model):
    died: list[str] = []
    own: Any = reopened(model, replicas=2)
    replicas = own.replicas()
    threads, second = replicas._workers._threads, replicas.replicas[1]
    inside, go_on, queue, decode = threading.Event(), threading.Event(), replicas.queue, second._decode

    def held_up(pending):
        inside.set()
        queue.lock.release()
        go_on.wait(20)
        queue.lock.acquire()
        gc.collect()
        decode(pending)

    second._decode = held_up
    stream = own.stream(PROMPTS, max_tokens=60, ignore_eos=True)
    while not inside.is_set():
        next(stream)
    own.cycle = own, Canary(died)
    gc.disable()
    try:
        del own, replicas, stream
        go_on.set()
        for thread in list(threads):
            thread.join(20)
    finally:
        gc.enable()
    assert not any(thread.is_alive() for thread in threads) and len(died) == 1 and died[0].startswith("et_jax")


AT_EXIT = """
import asyncio, gc, json, sys
from et_jax.serve import engine
settings, prompts = json.loads(sys.argv[1])
model = engine.load(replicas=2, **settings)

def drop():
    stream = model.stream(prompts, max_tokens=60, ignore_eos=True)
    try:
        for _ in stream:
            raise ValueError
    except ValueError as error:
        kept = error

def within():
    with engine.load(**settings) as own:
        yield from own.stream(prompts, max_tokens=60, ignore_eos=True)

async def begin():
    stream = model.stream_async(prompts, max_tokens=60, ignore_eos=True)
    await anext(stream)
    return stream

loop = asyncio.new_event_loop()
left = loop.run_until_complete(begin())
loop.close()
gc.disable()
drop()
open_stream, inner = model.stream(prompts, max_tokens=60, ignore_eos=True), within()
next(open_stream), next(inner)
completions = model.as_completed(iter([]))
print("done")
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_amid_streams_says_nothing(model):
    asked = json.dumps([SETTINGS, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, asked], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
