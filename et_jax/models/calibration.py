"""What was measured of a model on held-out text, kept beside its weights in calibration.json."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.io.files import replace_file
from et_jax.io.schema import CalibrationFile, checked, is_there, read_json
from et_jax.models.config import ModelShape
from et_jax.types import Table

FILE = "calibration.json"
_MOST_TEMPERATURE, _MOST_SENSITIVITY = 1e6, 1e12
_REMEDY = "measure it again with scripts/calibrate.py, or delete the file"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The temperature at which the raw entropy is measured, and how sensitive the model is to its heads.

    `sensitivity` is, for each layer, KV head and query head of its group, "l k g", what a squared error of length 1 in
    the head's output costs: nats of divergence of the next token's distribution; None where it was not measured.
    Raises UsageError for a temperature that is not above 0, and for sensitivities that are no such numbers.
    """

    temperature: float = 1.0
    sensitivity: Table | None = None

    def __post_init__(self) -> None:
        if not 0 < (temperature := values.number("temperature", self.temperature)) <= _MOST_TEMPERATURE:
            raise UsageError(f"temperature is {temperature}; it must be above 0, to {_MOST_TEMPERATURE:g} at most.")
        object.__setattr__(self, "temperature", temperature)
        if self.sensitivity is None:
            return
        if not isinstance(self.sensitivity, Table):
            raise UsageError(f"sensitivity is {values.shown(self.sensitivity)}; it must be an et_jax.types.Table.")
        table = self.sensitivity.array
        if table.ndim != 3 or table.dtype.kind != "f" or not np.all((table >= 0) & (table <= _MOST_SENSITIVITY)):
            raise UsageError(
                "sensitivity must hold a number from 0 up for each layer, KV head and query head of its group, as "
                "head_sensitivity returns them."
            )

    def check(self, model: ModelShape) -> None:
        """Raise UsageError unless the sensitivities are of the heads of `model`."""
        shape = model.num_layers, model.num_kv_heads, model.group_size
        if self.sensitivity is not None and self.sensitivity.array.shape != shape:
            raise UsageError(
                f"sensitivity has the shape {list(self.sensitivity.array.shape)} and {model.architecture} the heads "
                f"{list(shape)}; measure it of this model, with head_sensitivity."
            )


def read_calibration(folder: Path, config: ModelShape) -> Calibration:
    """Return what was measured of a model: temperature 1 and no sensitivity where nothing was.

    Raises UsageError for a file that holds no positive temperature, or sensitivities of other heads.
    """
    path = folder / FILE
    if not is_there(path):
        return Calibration()
    found = checked(read_json(path), CalibrationFile, path, _REMEDY)
    if found.sensitivity is None:
        return Calibration(temperature=found.temperature)
    shape = config.num_layers, config.num_kv_heads, config.group_size
    try:
        table = np.array(found.sensitivity, np.float32).reshape(shape)
    except ValueError as error:
        raise UsageError(
            f"{path}: sensitivity is not one number for each of {shape[0]} layers, {shape[1]} KV heads and their "
            f"{shape[2]} query heads; {_REMEDY}."
        ) from error
    return Calibration(temperature=found.temperature, sensitivity=Table(table))


def write_calibration(folder: Path, calibration: Calibration, facts: dict[str, Any]) -> Path:
    """Write what was measured, and how, beside the weights, and return the file."""
    path = folder / FILE
    content: dict[str, Any] = {"temperature": calibration.temperature}
    if calibration.sensitivity is not None:
        content["sensitivity"] = [
            [[float(f"{head:.4g}") for head in group] for group in layer] for layer in calibration.sensitivity.array
        ]
    replace_file(path, json.dumps(content | facts, indent=1) + "\n")
    return path
