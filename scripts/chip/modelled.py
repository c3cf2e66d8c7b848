"""What a step would take on an H200 by the bytes it moves and the kernels it launches: modelled, and not measured.

    python -m scripts.chip.modelled

    milliseconds = bytes / 4.2 TB/s + launches x 2.5 us

Bytes are those of `et_jax.decode.cost`: weights once, the blocks that are read, the summaries that choose them. A copy
within an H200's memory moves 4.2 TB/s. Launches are those of `aot.chips.KERNELS`, which `aot_check.py` counts in
compiled programs, in every layer and once a step. 2.5 us is about what a launch takes in a loop of XLA whose kernels
are short. Where kernels are long, launches hide behind them, and a step takes less. Of four steps under "off" that an
H200 took 8.6, 11.4, 15.5 and 2.4 ms for (1 x 32k, 16 x 8k and 8 x 32k of Llama-3-8B, 1 x 2k of SmolLM-135M), with 33
launches a layer and 150 a step, the model says 7.6, 10.7, 14.8 and 2.7.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.decode import cost
from et_jax.decode.plant import costs
from et_jax.decode.state import empty
from et_jax.models.params import abstract
from scripts.aot.chips import KERNELS
from scripts.chip.cases import CHOOSING, QUEST, Case, Settings, cases_of
from scripts.chip.decoding import READ, configuration
from scripts.measuring.results import table

BYTES_A_SECOND = 4.2e12
SECONDS_A_LAUNCH = 2.5e-6
# By control, the program whose layers launch as many kernels, and the share of the blocks that is read.
PROGRAMS = {"off": "llama3_8b, 32 layers", "paper": "last masses", "certified": "compressed", "adaptive": "adaptive"}
SHARES = {"quest": QUEST, **dict.fromkeys(CHOOSING, READ)}


def modelled(case: Case, share: float | None = None) -> dict[str, Any] | None:
    """Return the bytes, the launches and the modelled milliseconds of a case that reads a share of the blocks.

    None is returned where the kernels of a layer are not counted under its control.
    """
    if case.engine != "decode" or case.control not in PROGRAMS:
        return None
    config = configuration(case, Settings())
    weights = abstract(config.model, jnp.bfloat16)
    state = jax.eval_shape(partial(empty, config))
    [model] = costs(config.plants, (weights,), state.plants, config.by_mass_of)
    blocks = case.rows * model.heads * -(-case.tokens // config.page_size)
    read = (SHARES.get(case.control, 1.0) if share is None else share) * blocks
    num_bytes = float(model.weights) + float(cost.cached_bytes(model, read, blocks if model.summary else 0))
    of_layer, of_step = KERNELS[PROGRAMS[case.control]]
    launches = config.model.num_layers * of_layer + of_step
    milliseconds = 1e3 * (num_bytes / BYTES_A_SECOND + launches * SECONDS_A_LAUNCH)
    return {"bytes": num_bytes, "launches": launches, "milliseconds": milliseconds}


def shown(cases: list[Case]) -> str:
    """Return the table of modelled steps."""
    header = ["shape", "sequences x tokens", "control", "read", "GB", "ms of bytes", "launches", "ms, modelled"]
    rows = []
    for case in cases:
        if (found := modelled(case)) is not None:
            of_bytes = 1e3 * found["bytes"] / BYTES_A_SECOND
            place = [case.shape, f"{case.rows} x {case.tokens}", case.control, SHARES.get(case.control, 1.0)]
            rows.append([*place, found["bytes"] / 1e9, of_bytes, found["launches"], found["milliseconds"]])
    return table(header, rows)


if __name__ == "__main__":
    print(shown(cases_of(Settings(), False)))
