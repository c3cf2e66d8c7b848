"""What was measured of a model on text: in its folder's calibration.json, or by the fingerprint of its weights.

By fingerprint the user's cache keeps what `python -m et_jax.calibrate` or loading measured, and the package brings what
was measured of models that other packages carry.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.io.files import cache_folder, replace_file
from et_jax.io.json_files import checked, is_there, read_json
from et_jax.io.schema import CalibrationFile
from et_jax.models.config import ModelShape
from et_jax.models.fingerprint import fingerprint
from et_jax.types import Table

FILE = "calibration.json"
SHIPPED = Path(__file__).parent / "calibrations"
TEXT = SHIPPED / "text.txt"
"""The text that models are measured on unless another is given."""

EQUAL = 1e-3
"""What stands for each sensitivity where none was measured. The medians of bundled, smollm2 and gemma3-270m are from
1.8e-4 to 6.4e-4, and more is careful: more blocks are read at the same tolerance."""

_MOST_TEMPERATURE, _MOST_SENSITIVITY = 1e6, 1e12
_REMEDY = "measure it again with python -m et_jax.calibrate, or delete the file"


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

    def of(self, model: ModelShape) -> "Calibration":
        """Return the calibration with its query heads in the groups of a model that has copies of its KV heads."""
        if self.sensitivity is None or self.sensitivity.array.shape[1] == model.num_kv_heads:
            return self
        heads = self.sensitivity.array.reshape(len(self.sensitivity.array), model.num_kv_heads, -1)
        return dataclasses.replace(self, sensitivity=Table(heads))

    def check(self, model: ModelShape) -> None:
        """Raise UsageError unless the sensitivities are of the heads of `model`."""
        shape = model.num_layers, model.num_kv_heads, model.group_size
        if self.sensitivity is not None and self.sensitivity.array.shape != shape:
            raise UsageError(
                f"sensitivity has the shape {list(self.sensitivity.array.shape)} and {model.architecture} the heads "
                f"{list(shape)}; measure it of this model, with head_sensitivity."
            )


def equal_heads(model: ModelShape) -> Calibration:
    """Return the calibration of a model that was not measured: as sensitive to each of its heads."""
    shape = model.num_layers, model.num_kv_heads, model.group_size
    return Calibration(sensitivity=Table(np.full(shape, EQUAL, np.float32)))


def read_calibration(model: Path, config: ModelShape, adapter: Path | None = None) -> Calibration:
    """Return what was measured of the model in a folder or a GGUF file: temperature 1 and no sensitivity if nothing.

    With an `adapter` merged into it the model is another one, and the adapter's folder stands for the model's. The
    folder's own file counts before the user's cache, and that before the package. The sensitivity is taken from the
    first that has one. Raises UsageError for a file that holds no positive temperature, or sensitivities of other
    heads.
    """
    own = _read((adapter or model) / FILE, config)
    if own is not None and own.sensitivity is not None:
        return own
    places, digest = [SHIPPED], fingerprint(model, adapter)
    with contextlib.suppress(UsageError):  # there is no home
        places.insert(0, cache_folder() / "calibrations")
    found = (_read(place / f"{digest}.json", config) for place in places)
    kept = next((one for one in found if one is not None), Calibration())
    return kept if own is None else dataclasses.replace(own, sensitivity=kept.sensitivity)


def _read(path: Path, config: ModelShape) -> Calibration | None:
    """Return what a file says, None where there is no file."""
    if not is_there(path):
        return None
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


def as_kept(sensitivity: Float[np.ndarray, "l k g"]) -> Table:
    """Return sensitivities with the digits that files keep: a model has the same before and after they are written."""
    return Table(np.array(_digits(sensitivity), np.float32))


def _digits(sensitivity: Float[np.ndarray, "l k g"]) -> list[list[list[float]]]:
    return [[[float(f"{head:.4g}") for head in group] for group in layer] for layer in sensitivity]


def write_calibration(folder: Path, calibration: Calibration, facts: dict[str, Any], name: str = FILE) -> Path:
    """Write what was measured, and how, to a file of a folder, and return the file."""
    path = folder / name
    content: dict[str, Any] = {"temperature": calibration.temperature}
    if calibration.sensitivity is not None:
        content["sensitivity"] = _digits(calibration.sensitivity.array)
    replace_file(path, json.dumps(content | facts, indent=1) + "\n")
    return path


def keep_calibration(model: Path, calibration: Calibration, facts: dict[str, Any], adapter: Path | None = None) -> Path:
    """Write what was measured of a model to the user's cache, where loading finds it, and return the file.

    It is that of the model with the `adapter` that was merged into it.

    Raises UsageError where the cache cannot be written.
    """
    folder = cache_folder() / "calibrations"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to another folder."
        ) from error
    return write_calibration(folder, calibration, facts, f"{fingerprint(model, adapter)}.json")
