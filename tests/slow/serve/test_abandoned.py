"""Streams that nobody closes: the garbage collector ends them, in whatever thread it runs, without a lock."""

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import weakref

import pytest
from reopened import PROMPTS, TWO_SLOTS, assert_balanced, reopened, tokens_of

from et_jax.serve.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=3, temperature=0.9)


@pytest.fixture(scope="module")
def served(two_slots):
    return reopened(two_slots, replicas=2)


@pytest.fixture(scope="module")
def expected(served):
    return tokens_of(served, PROMPTS, PARAMS)


def dropped(model) -> weakref.ref:
    """Leave a stream under way in a cycle with the exception that ended its loop."""
    stream = model.stream(PROMPTS * 2, max_tokens=60, ignore_eos=True)
    try:
        for _ in stream:
            raise ValueError("the caller's own")
    except ValueError as error:
        kept = error  # noqa: F841
    return weakref.ref(stream)


@pytest.mark.timeout(120)
def test_a_stream_that_is_collected_takes_no_lock_and_leaves_nothing(two_slots, expected):
    """The thread that collects it may have every lock: a finaliser that asked for one would wait for ever."""
    served = reopened(two_slots, replicas=2)
    replicas = served.replicas()
    # One step a round: no sequence ends before it is abandoned.
    replicas.each(lambda replica: setattr(replica.bursts, "burst_seconds", 0.0))
    gc.disable()
    try:
        stream = dropped(served)
        with contextlib.ExitStack() as held:
            for lock in (*(replica.lock for replica in replicas.replicas), replicas.queue.lock, served._decoders.lock):
                held.enter_context(lock)
            assert stream() is not None
            gc.collect()
            assert stream() is None
    finally:
        gc.enable()
    assert tokens_of(served, PROMPTS, PARAMS) == expected
    assert_balanced(served)
    assert served.metrics.finished["abort"] == 2 * len(PROMPTS)


@pytest.mark.parametrize("end", ["aclose", "dropped", "loop closed", "cancelled", "cancelled twice", "run over"])
def test_an_asyncio_stream_that_is_left_in_any_way_leaves_nothing(served, expected, end, recwarn):
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
    assert tokens_of(served, PROMPTS, PARAMS) == expected
    assert_balanced(served)
    assert not complaints and not recwarn.list


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
print("done")
"""


def test_an_interpreter_that_ends_amid_streams_says_nothing():
    asked = json.dumps([TWO_SLOTS, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, asked], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
