"""The calibrated temperature of a model, kept beside its weights in calibration.json."""

import json
from pathlib import Path
from typing import Any

from et_jax.io.schema import CalibrationFile, checked, is_there, read_json

FILE = "calibration.json"


def read_calibration(folder: Path) -> float:
    """Return the temperature at which the model's raw entropy is measured: 1 where none was fitted.

    Raises UsageError for a file that holds no positive temperature.
    """
    path = folder / FILE
    if not is_there(path):
        return 1.0
    remedy = "fit it again with scripts/calibrate.py, or delete the file"
    return checked(read_json(path), CalibrationFile, path, remedy).temperature


def write_calibration(folder: Path, temperature: float, facts: dict[str, Any]) -> Path:
    """Write the temperature and how it was found beside the weights, and return the file."""
    path = folder / FILE
    path.write_text(json.dumps({"temperature": temperature} | facts, indent=1) + "\n", encoding="utf-8")
    return path
