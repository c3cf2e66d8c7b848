"""Where a model may not be used: closed, in a fork of its process, in a traced function, in a copy."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from reopened import PROMPTS, TWO_SLOTS, reopened

from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.replica import Replica
from et_jax.serve.replicas import Replicas
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
REQUEST = GenerationRequest(prompt="It was", params=PARAMS)
CLOSED = r"^The model bundled-small is closed; load it anew\.$"
TRACED = "cannot be loaded or used within a function that JAX traces"


def live() -> int:
    """Bytes of all arrays there are."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def uses(model):
    """Every way to use a model, by name."""
    return {
        "generate": lambda: model.generate(PROMPTS, PARAMS),
        "stream": lambda: list(model.stream(PROMPTS, PARAMS)),
        "as_completed": lambda: list(model.as_completed([REQUEST])),
        "warm_up": model.warm_up,
        "replicas": model.replicas,
        "enter": model.__enter__,
    }


def test_a_closed_model_gives_its_memory_back_and_is_used_no_more(two_slots):
    before = live()
    with reopened(two_slots, replicas=2) as own:
        copied = jax.tree.map(jnp.copy, two_slots.weights)
        own._decoders._weights = copied
        del copied
        own.generate(PROMPTS, PARAMS)
        # One step a round: the stream is still open when the model is closed.
        own.replicas().each(lambda replica: setattr(replica.bursts, "burst_seconds", 0.0))
        open_stream, unbegun = own.stream(PROMPTS, max_tokens=60, ignore_eos=True), own.stream(PROMPTS, PARAMS)
        completions = own.as_completed([REQUEST] * 4)
        next(open_stream), next(completions)
        assert live() > before + sum(leaf.nbytes for leaf in jax.tree.leaves(two_slots.params))
    assert live() == before  # with the streams still open
    more = {"params": lambda: own.params, "decoder": own.decoder, "describe": own.describe}
    more |= {"a stream": lambda: list(open_stream), "another": lambda: list(unbegun), "rows": lambda: list(completions)}
    for name, use in (uses(own) | more).items():
        with pytest.raises(UsageError, match=CLOSED):
            use()
            pytest.fail(name)
    own.close()
    assert own.metrics.prompt_tokens and own.name == "bundled-small" and live() == before


def test_a_model_that_is_dropped_gives_its_memory_back_and_ends_its_threads(two_slots):
    own, before = reopened(two_slots, replicas=2), live()
    own.generate(PROMPTS, PARAMS)
    assert live() > before
    threads = list(own.replicas()._workers._threads)
    del own
    assert live() == before
    for thread in threads:
        thread.join(20)
    assert threads and not any(thread.is_alive() for thread in threads)


def test_closing_ends_what_runs_in_other_threads_in_the_same_sentence(two_slots, monkeypatch):
    own, before = reopened(two_slots, replicas=2), live()
    own.generate(PROMPTS, PARAMS)
    inside, decode = threading.Event(), Replica._round

    def slowly(replica):
        inside.set()
        time.sleep(0.05)
        decode(replica)

    monkeypatch.setattr(Replica, "_round", slowly)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(own.generate, PROMPTS, max_tokens=80, ignore_eos=True) for _ in range(3)]
        assert inside.wait(20)
        closing = [pool.submit(own.close) for _ in range(2)]
        assert [one.result(20) for one in closing] == [None, None]
        said = [str(one.exception(20)) for one in running]
    assert said == ["The model bundled-small is closed; load it anew."] * 3
    del running
    assert live() == before


def test_a_model_closed_while_it_is_compiled_or_by_a_finaliser_in_its_own_round_is_closed(two_slots, monkeypatch):
    own, before = reopened(two_slots), live()
    with monkeypatch.context() as patch:
        patch.setattr(Replicas, "warm_up", lambda *_: own.close())
        with pytest.raises(UsageError, match=CLOSED):
            own.generate(PROMPTS, PARAMS)
    assert live() == before and not own._decoders.serving
    own = reopened(two_slots)
    [replica] = own.replicas().replicas
    decode = replica._round
    monkeypatch.setattr(replica, "_round", lambda: (own.close(), decode()))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(UsageError, match=CLOSED):
        own.generate(PROMPTS, max_tokens=60)


def test_no_model_is_copied_or_pickled(two_slots):
    for make in (pickle.dumps, copy.copy, copy.deepcopy, lambda one: pickle.dumps([one])):
        with pytest.raises(UsageError, match=r"^The model bundled-small cannot be copied or pickled, .*load it again"):
            make(two_slots)


def test_a_model_within_a_traced_function_is_refused_and_where_there_are_numbers_it_serves(two_slots):
    model = two_slots
    started = model.stream(PROMPTS, max_tokens=60, ignore_eos=True)
    next(started)
    mesh = jax.make_mesh((1,), ("a",))
    whole = jax.sharding.PartitionSpec()
    ways = {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "shard_map": lambda f: jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole),
        "scan": lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, length=2),
        "grad of jit": lambda f: jax.grad(jax.jit(f)),
    }
    refused = [use for name, use in uses(model).items() if name != "enter"]
    for name, traced in ways.items():
        for use in (*refused, lambda: engine.load(**TWO_SLOTS)):

            def asking(x, use=use):
                use()
                return x

            with pytest.raises(UsageError, match=TRACED):
                traced(asking)(jnp.float32(1))
                pytest.fail(name)
    expected = model.generate(PROMPTS, PARAMS)
    for served in (jax.grad, lambda f: jax.vmap(f, axis_size=3, in_axes=None)):
        got = []

        def function(x, got=got):
            got += model.generate(PROMPTS, PARAMS)
            next(started)
            return x

        served(function)(jnp.float32(1))
        assert [one.token_ids for one in got] == [one.token_ids for one in expected]
        with jax.set_mesh(mesh), pytest.raises(UsageError, match=r"^A model .* under a mesh \(jax.set_mesh\); do it "):
            served(function)(jnp.float32(1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX systems")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_of_the_process_must_load_the_model_itself(two_slots):
    model = two_slots
    replicas, started = model.replicas(), model.stream(PROMPTS, max_tokens=60, ignore_eos=True)
    next(started)
    reader, writer = os.pipe()
    with replicas.queue.lock:  # as a thread may hold it when a process is forked
        child = os.fork()
    if not child:
        signal.alarm(30)
        for use in (*uses(model).values(), lambda: list(started)):
            try:
                use()
            except UsageError as error:
                os.write(writer, f"{error}\n".encode())
        model.close()
        model.close()
        os._exit(7)  # as multiprocessing ends a fork: JAX does not survive an ordinary exit of one
    os.close(writer)
    with open(reader) as said:
        sentences = said.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sentence = "The model bundled-small was loaded before this process was forked, and its threads are not here; "
    sentence += "load it in each "
    assert len(sentences) == len(uses(model)) + 1
    assert all(one.startswith(sentence) and one.endswith(".") for one in sentences)
    assert sum(event.completion is not None for event in started) == len(PROMPTS)
