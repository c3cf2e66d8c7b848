"""The calibrated temperature of a model, kept beside its weights in calibration.json."""

import json
import math
from pathlib import Path
from typing import Any

from et_jax.types import UsageError

FILE = "calibration.json"


def read_calibration(folder: Path) -> float:
    """Return the temperature at which the model's raw entropy is measured: 1 where none was fitted.

    Raises UsageError for a file that holds no positive temperature.
    """
    path = folder / FILE
    if not path.exists():
        return 1.0
    try:
        temperature = float(json.loads(path.read_text(encoding="utf-8"))["temperature"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'{path} holds no "temperature"; delete it or fit it again with scripts/calibrate.py.'
        ) from error
    if not 0 < temperature < math.inf:
        raise UsageError(f"{path} says temperature {temperature}; it must be above 0: fit it again or delete the file.")
    return temperature


def write_calibration(folder: Path, temperature: float, facts: dict[str, Any]) -> Path:
    """Write the temperature and how it was found beside the weights, and return the file."""
    path = folder / FILE
    path.write_text(json.dumps({"temperature": temperature} | facts, indent=1) + "\n", encoding="utf-8")
    return path
