"""What a mixture of experts costs by the experts it touches: the loop over them and ragged products, on this device.

    python scripts/bench_experts.py

Every line runs one layer's experts on so many tokens, each of which goes to as many experts as trained, among all of
them or among few. The forms take turns; told are the medians of their times, and of each round's ratios.
"""

import dataclasses
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.evidence.serving_tables import experts
from et_jax.models.config import ExpertConfig
from et_jax.models.experts import Choice, Experts, mixed
from et_jax.models.model import expert_bytes
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.shapes import SMALL

FORMS = ("loop", "ragged")
WIDTH = 512
CONFIG = ExpertConfig(num_experts=32, num_per_token=4, width=384, normalised=True, layers=(True,))
CASES = (*((batch, 32) for batch in (1, 2, 4, 8, 16, 32, 64)), *((16, among) for among in (4, 8, 16)))
"""Tokens, and the experts among which each of them goes to some."""


def drawn(batch: int, among: int, seed: int) -> Choice:
    """Return experts for every token, drawn without return from the first `among`, of equal weight."""
    rng = np.random.default_rng(seed)
    each = [rng.permutation(among)[: CONFIG.num_per_token] for _ in range(batch)]
    shape = batch, CONFIG.num_per_token
    return Choice(expert=jnp.asarray(np.array(each), jnp.int32), weight=jnp.full(shape, 1 / CONFIG.num_per_token))


@partial(jax.jit, static_argnums=3)
def run(layer: Experts, x: Float[Array, "n w"], choice: Choice, form: Any) -> Float[Array, "n w"]:
    """Return what the experts make of the tokens."""
    return mixed(layer, x, choice, form)


def measured(params: Params, batch: int, among: int, rounds: int) -> dict[str, Any]:
    """Return the experts touched, the bytes of their weights, and milliseconds by form, as medians."""
    layer = params.layers[0].experts
    assert layer is not None
    x = jax.random.normal(jax.random.key(1), (batch, WIDTH)).astype(params.embedding.dtype)
    choices = [drawn(batch, among, seed) for seed in range(rounds)]
    touched = [int(choice.touched(CONFIG.num_experts).sum()) for choice in choices]
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for form in FORMS:
        jax.block_until_ready(run(layer, x, choices[0], form))  # compiles
    for choice in choices:
        for form in FORMS:
            began = time.perf_counter()
            jax.block_until_ready(run(layer, x, choice, form))
            seconds[form].append(time.perf_counter() - began)
    mean = statistics.mean(touched)
    return {
        "batch": batch,
        "among": among,
        "touched": mean,
        "megabytes": mean * expert_bytes(params) / 1e6,
        "milliseconds": {form: 1e3 * statistics.median(each) for form, each in seconds.items()},
        "ragged_over_loop": float(np.median(np.divide(seconds["ragged"], seconds["loop"]))),
    }


def main() -> None:
    """Measure every case, print a table and write the figures."""
    parser = arguments.parser(__doc__, results="experts.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=arguments.count(), default=7, help="runs of every line (default 7)")
    args = parser.parse_args()
    layer = dataclasses.replace(SMALL, hidden_size=WIDTH, num_layers=1, windows=(None,), experts=CONFIG)
    params = initialise(layer, jax.random.key(0), args.dtype)
    cases = [measured(params, batch, among, args.rounds) for batch, among in CASES]
    print(experts(cases))
    settings = {
        "dtype": args.dtype,
        "rounds": args.rounds,
        "experts": CONFIG.num_experts,
        "width": WIDTH,
        "expert width": CONFIG.width,
    }
    write(args.output, "scripts/bench_experts.py", settings, cases=cases)


if __name__ == "__main__":
    main()
