"""Counters in the exposition format of Prometheus."""

import re

from et_jax.serve.metrics import Metrics
from et_jax.serve.programs.compilation import Made

SAMPLE = r'\1(?:\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"\})? (?:[0-9.e+]+)\n'
FAMILY = rf"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*_total) .+\n# TYPE \1 counter\n((?:{SAMPLE})*)"
"""The samples of a counter after its HELP and TYPE."""


def test_every_counter_is_written_under_its_name():
    metrics = Metrics(prompt_tokens=3, generated_tokens=12, entropic_time=1.5, cost=2.5e12, waiting_seconds=0.25)
    metrics.steps, metrics.drafted_tokens, metrics.accepted_tokens, metrics.small_tokens = 7, 5, 2, 4
    for reason in ("stop", "length", "stop", 'a "b"\\n\nc'):
        metrics.finish(reason)
    metrics.add_programs(Made(programs=3, tracing=1.5, compiling=2.5, loading=0.5))
    text = metrics.prometheus()
    families = list(re.finditer(FAMILY, text))
    assert "".join(family[0] for family in families) == text
    found = {family[1].removeprefix("et_jax_").removesuffix("_total"): family[2] for family in families}
    assert len(found) == len(families)
    reasons = dict(
        re.findall(r'et_jax_requests_finished_total\{reason="(.*)"\} (\S+)\n', found.pop("requests_finished"))
    )
    assert reasons == {"stop": "2", "length": "1", r"a \"b\"\\n\nc": "1"}
    counted = {name: float(samples.split()[1]) for name, samples in found.items()}
    expected = {"prompt_tokens": 3, "generated_tokens": 12, "entropic_time_nats": 1.5, "cost_bytes": 2.5e12}
    expected |= {"waiting_seconds": 0.25, "steps": 7, "drafted_tokens": 5, "accepted_tokens": 2, "small_tokens": 4}
    expected |= {"programs_compiled": 3, "tracing_seconds": 1.5, "compiling_seconds": 2.5, "loading_seconds": 0.5}
    zeros = ("cached_prompt_tokens", "step_rows", "idle_rows", "preemptions", "programs_compiled_late", "flops")
    assert counted == dict.fromkeys((*zeros, "idle_cost_bytes", "idle_flops", "serving_seconds"), 0) | expected
