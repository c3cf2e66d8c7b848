"""Several replicas before one queue: a swapped sequence, a failure, an interrupt, devices of their own."""

import dataclasses
import json
import subprocess
import sys
import threading
import time

import pytest
from reopened import reopened

from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SETTINGS = {"max_num_seqs": 2, "max_model_len": 96, "prefill_batch": 32}
PROMPTS = [f"In the year {year} the old king" for year in range(1800, 1812)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, temperature=0.9)

ON_TWO_DEVICES = """
import json, sys
import jax
from et_jax.serve import engine
from et_jax.serve.requests import SamplingParams
jax.config.update("jax_num_cpu_devices", 2)
settings, prompts, params = json.loads(sys.argv[1])
model = engine.load(replicas=2, **settings)
texts = [list(done.token_ids) for done in model.generate(prompts, SamplingParams(**params))]
replicas = model.replicas().replicas
held = [jax.tree.leaves((replica.device.weights, replica.device.state)) for replica in replicas]
print(json.dumps({
    "texts": texts,
    "devices": [sorted(device.id for x in leaves for device in x.devices()) for leaves in held],
    "rounds": [b._rounds for b in replicas],
    "late": model.metrics.programs_compiled_late,
}))
"""


@pytest.fixture(scope="module")
def model():
    return engine.load(**SETTINGS)


@pytest.fixture(scope="module")
def texts(model):
    return [list(done.token_ids) for done in model.generate(PROMPTS, PARAMS)]


def test_a_sequence_swapped_out_of_one_replica_goes_on_in_another(model, texts):
    replicas = reopened(model, replicas=2).replicas()
    queue, [first, second] = replicas.queue, replicas.replicas
    first.burst_seconds = 0.0  # one step a round
    events = []
    [sequence] = model.sequences(0, GenerationRequest(prompt=PROMPTS[0], params=PARAMS))
    queue.submit(sequence, events.append)
    for _ in range(5):
        first.advance()
    assert 0 < len(events) < PARAMS.max_tokens
    with queue.lock:
        first._preempt(sequence)
    while not replicas.idle:
        second.advance()
    assert list(events[-1].completion.token_ids) == texts[0]
    for replica in replicas.replicas:
        assert int(replica.device.state.table.num_free) == replica.pool.num_free
        replica.forget_prefixes()
        assert int(replica.device.state.table.num_free) == model.decoder_config.num_pages - 1


def test_a_replica_that_fails_is_heard_of_and_the_model_goes_on(model, texts, monkeypatch):
    served = reopened(model, replicas=2)
    last = served.replicas().replicas[1]

    def torn(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(last, "_decode", torn)
    with pytest.raises(RuntimeError, match="the device is gone"):
        served.generate(PROMPTS, PARAMS)
    assert [list(done.token_ids) for done in served.generate(PROMPTS, PARAMS)] == texts


def test_every_stream_hears_why_a_round_failed_that_ended_while_none_waited_for_it(model, monkeypatch):
    served = reopened(model, replicas=2)
    [first, second] = served.replicas().replicas
    inside, go_on = threading.Event(), threading.Event()

    def torn(*_):
        inside.set()
        second.queue.lock.release()
        go_on.wait(20)
        second.queue.lock.acquire()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(second, "_decode", torn)
    streams = [served.stream(PROMPTS, PARAMS), served.stream(PROMPTS[:1], PARAMS)]
    while not inside.is_set() or not first.slots:
        next(streams[0])
    next(streams[1])
    go_on.set()
    while not second.broken:
        time.sleep(0.01)
    for stream in streams:
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(stream)


def test_a_stream_closed_while_a_round_runs_leaves_nothing(model):
    served = reopened(model, replicas=2)
    replicas = served.replicas()
    [first, second] = replicas.replicas
    inside, go_on, decode = threading.Event(), threading.Event(), second._decode

    def held_up(pending):
        inside.set()
        second.queue.lock.release()
        go_on.wait(20)
        second.queue.lock.acquire()
        decode(pending)

    second._decode = held_up
    stream = served.stream(PROMPTS, PARAMS)
    while not inside.is_set():
        next(stream)
    assert second.slots and first.slots
    stream.close()
    assert second.slots  # a slot is not emptied under a running round
    go_on.set()
    assert served.replicas().idle
    del second._decode


def test_each_replica_has_a_device_of_its_own_where_there_are_several(texts):
    asked = json.dumps([SETTINGS, PROMPTS, dataclasses.asdict(PARAMS)])
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES, asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["texts"] == texts
    assert [set(devices) for devices in said["devices"]] == [{0}, {1}]
    assert min(said["rounds"]) > 3 and said["late"] == 0
