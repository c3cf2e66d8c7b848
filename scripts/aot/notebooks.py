"""What the notebooks run, as decoders to compile for a chip: their models, under their settings.

The module of `own_model` is read from the cell of the notebook that writes it.
"""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
from aot.chips import CHIPS, Chip
from aot.decoders import function_program, weights_on
from aot.programs import Lowering, Program, device_of, traced_for
from flax import nnx

from et_jax.control.base import ControlState, Signals, chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.temperature import Thermostat
from et_jax.decode.backends import serving_backend
from et_jax.models.checkpoint import read_config, stored_dtype
from et_jax.models.hub import resolve
from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import read_module
from et_jax.models.params import abstract
from et_jax.models.stacks import stacked_on
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import decoder_config
from et_jax.types import replace

CHIP = "TPU v5e"  # that Colab lends
PAGE_SIZE, PREFILL_BATCH = 128, 512  # on a TPU, unless the caller says otherwise
MODULE_CLASS, MODULE_SETTINGS = "LanguageModel", {"vocab_size": 4096, "num_layers": 2}


def warm_when_unsure(signals: Signals, state: ControlState) -> ControlState:
    """The law that the quickstart writes."""
    return replace(state, temperature=0.4 + 0.15 * signals.entropy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A decoder of a notebook: its settings as `load` takes them, and the functions that differ from its other ones.

    `model` is a name that `load` takes, None for the module of `own_model`. `usual` as in `Program`.
    """

    name: str
    settings: dict[str, Any]
    functions: tuple[str, ...] = ("decode",)
    model: str | None = "bundled"
    usual: bool = True


_START = {"max_num_seqs": 4, "max_model_len": 512}
_LONG = {"max_num_seqs": 4, "max_model_len": 1024, "trace_reads": True}
_OWN = {"max_num_seqs": 4}
_THERMOSTAT = Controller(law=chain(FallClock(), Thermostat(2.0, gain=0.05)))
_CERTIFIED = preset("certified", tolerance=0.05, min_blocks=1, window=16, target_entropy=0.5)
RUNS = (
    Run(name="quickstart", settings=_START, functions=("decode", "prefill"), model="smollm2"),
    Run(
        name="quickstart law",
        settings=_START | {"control": Controller(law=chain(FallClock(), warm_when_unsure))},
        model="smollm2",
    ),
    Run(name="control thermostat", settings=_START | {"control": _THERMOSTAT}),
    Run(name="control certified", settings=_START | {"control": preset("certified", tolerance=0.05)}),
    Run(name="long_context off", settings=_LONG),
    Run(name="long_context guarded", settings=_LONG | {"control": "guarded"}),
    Run(name="long_context certified", settings=_LONG | {"control": "certified"}, functions=("decode", "prefill")),
    Run(name="own_model", settings=_OWN, functions=("decode", "prefill"), model=None),
    Run(name="own_model certified", settings=_OWN | {"control": _CERTIFIED}, model=None, usual=False),
    Run(name="own_model drafts", settings=_OWN | {"draft": "lookup"}, model=None),
)


def notebook_programs() -> list[Program]:
    """Return the functions of what notebooks run, for the chip that they ask for."""
    return [
        Program(
            name=f"{run.name} {function}",
            chip=chip.name,
            build=partial(notebook_program, run, chip, function),
            usual=run.usual,
        )
        for chip in CHIPS
        if chip.name == CHIP
        for run in RUNS
        for function in run.functions
    ]


def notebook_program(run: Run, chip: Chip, function: str) -> Lowering:
    """Return one function of a decoder that a notebook runs, by the best kernels that serve its model on the chip.

    Of its pages it is asked only that they are written in place: all of them fit a vector memory, which XLA uses.
    """
    device = device_of(chip)
    plain, _ = configured(run, "xla")
    assert chip.backend is not None
    with traced_for(device):
        backend, _ = serving_backend(plain.model, chip.page_size, plain.weights_dtype, plain.cache_dtype, chip.backend)
    config, weights = configured(run, backend)
    lowering = function_program(function, config, weights_on(weights, device), device)
    return dataclasses.replace(lowering, pool={}, temporary_bound=math.inf)


def configured(run: Run, backend: str) -> tuple[Any, Any]:
    """Return the configuration of a run's decoder on a TPU, and the shapes of its weights, of one model."""
    if run.model is None:
        model, weights = own_module()
        dtype = model.dtype
    else:
        folder = resolve(run.model)
        model, dtype = read_config(folder), stored_dtype(folder, "auto")
        weights = abstract(model, dtype, stacked=stacked_on("tpu"))
    sizes = {"page_size": PAGE_SIZE, "prefill_batch": min(PREFILL_BATCH, run.settings.get("max_model_len", 512))}
    settings = EngineConfig(**run.settings | sizes | {"backend": backend})
    return decoder_config(settings, model, dtype), (weights,)


def own_module() -> tuple[Any, Any]:
    """Return the module that `own_model` writes, as part of a program, and its weights."""
    notebook = Path(__file__).resolve().parents[2] / "notebooks/own_model.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]
    [source] = [text for text in cells if f"class {MODULE_CLASS}(" in text]
    names: dict[str, Any] = {"jax": jax, "jnp": jax.numpy, "nnx": nnx, "__name__": "own_model"}
    exec(compile(source, "own_model", "exec"), names)
    module = names[MODULE_CLASS](**MODULE_SETTINGS, rngs=nnx.Rngs(0))
    return read_module(module, ModuleConfig(max_positions=names["LENGTH"]))
