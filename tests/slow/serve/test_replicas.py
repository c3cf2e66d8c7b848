"""Several replicas before one queue: a swapped sequence, a failure, an interrupt, devices of their own."""

import dataclasses
import json
import subprocess
import sys
import threading
import time

import pytest
from reopened import TWO_SLOTS, reopened, tokens_of

from et_jax.serve.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

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
def expected(two_slots):
    return tokens_of(two_slots, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("number", "work", "failure"),
    [(1, "_round", RuntimeError("the device is gone")), (0, "_prefill", KeyboardInterrupt("stop"))],
    ids=["failure", "interrupt"],
)
def test_a_round_that_fails_reaches_the_caller_and_the_model_goes_on(
    two_slots, expected, monkeypatch, number, work, failure
):
    served = reopened(two_slots, replicas=2)

    def torn(*_):
        raise failure

    monkeypatch.setattr(served.replicas().replicas[number], work, torn)
    with pytest.raises(type(failure), match=str(failure)):
        served.generate(PROMPTS, PARAMS)
    assert tokens_of(served, PROMPTS, PARAMS) == expected


def test_a_failure_reaches_every_stream_though_none_waited_for_its_round(two_slots):
    served = reopened(two_slots, replicas=2)
    [first, second] = served.replicas().replicas
    first.bursts.burst_seconds = 0.0  # one step a round, so that no stream ends before the other replica fails
    inside, go_on = threading.Event(), threading.Event()

    def torn(pending: bool) -> None:
        inside.set()
        second.queue.lock.release()
        go_on.wait(20)
        second.queue.lock.acquire()
        raise RuntimeError("the device is gone")

    second.bursts.start = torn
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


def test_each_replica_has_a_device_of_its_own_where_there_are_several(expected):
    asked = json.dumps([TWO_SLOTS, PROMPTS, dataclasses.asdict(PARAMS)])
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES, asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["texts"] == expected
    assert [set(devices) for devices in said["devices"]] == [{0}, {1}]
    assert min(said["rounds"]) > 3 and said["late"] == 0
