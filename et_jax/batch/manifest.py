"""The manifest of an output: a small file beside it with the settings that its answers depend on.

The first job of an output writes it, and each further job compares its settings with it. `model` is only for readers:
the model is identified by the digest of its files, whatever their path.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.serve.requests import SamplingParams

VERSION = 2  # of the manifest and of the ids of rows; the first had no version
_MAX_BYTES = 16 * 2**20
_SHOWN = 60  # characters of a value in a sentence
_MAX_NAMED = 16  # settings in a sentence
_NOT_COMPARED = ("model", "version")
_CALLED = {
    "model_files": "the digest of the files of the model and its adapter",
    "platform": "the kind of device",
    "input_commit": "the commit of --input, which hf://datasets/OWNER/NAME@COMMIT/FILE names,",
}


def manifest_path(output: Path) -> Path:
    """Return the path of the manifest of an output file."""
    return output.with_name(output.name + ".manifest.json")


class Manifest:
    """The manifest of the output at `path`, for a job of `settings` (values of JSON)."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._output = manifest_path(path), path
        self._text = json.dumps({"version": VERSION, **settings}, indent=2) + "\n"
        self._seen: tuple[int, ...] | None = None  # the file's identity when its content was last verified

    def begin(self) -> None:
        """Write the manifest of a new output. Raises UsageError rather than overwrite a file of another kind."""
        if os.path.lexists(self.path):
            self._read()
        replace_file(self.path, self._text)
        self._seen = self._state()

    def compare(self) -> None:
        """Compare the manifest of an output that was begun before. Raises UsageError naming what differs."""
        if not os.path.lexists(self.path):
            raise UsageError(
                f"{self._output} has no {self.path.name} beside it, so no job began it; choose another --output."
            )
        before = self._read()
        version = before.get("version", 1)
        if version != VERSION:
            older = version < VERSION
            raise UsageError(
                f"{self._output} was begun by {'an earlier' if older else 'a later'} version of et_jax, "
                "which named its rows in another way; finish it with that version, or choose another --output."
            )
        differing = _differences(_flat(before), _flat(json.loads(self._text)))
        if differing:
            raise UsageError(
                f"{self._output} was begun under other settings: {'; '.join(differing)}; "
                "repeat the command it was begun with, or choose another --output."
            )
        self._seen = self._state()

    def restore(self) -> str | None:
        """Write the manifest again if it was removed or changed, and return a sentence about that."""
        state = self._state()
        if state == self._seen:
            return None
        ours = self._text.encode()
        if state is not None and self.path.is_file() and self._bytes(len(ours)) == ours:
            self._seen = state
            return None
        replace_file(self.path, self._text)
        self._seen = self._state()
        what = "removed" if state is None else "changed"
        return f"{self.path} was {what} while the job ran; it is written again, for the rows depend on it"

    def copy(self, output: Path) -> Path:
        """Write the manifest beside another output file, and return where. Raises UsageError."""
        place = manifest_path(output)
        replace_file(place, self._text)
        return place

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _bytes(self, most: int) -> bytes:
        """Return the bytes of the manifest, at most `most` + 1."""
        with self.path.open("rb") as file:
            return file.read(most + 1)

    def _read(self) -> dict[str, Any]:
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise UsageError(f"{self.path} is not a regular file; choose another --output.")
        try:
            data = self._bytes(_MAX_BYTES)
            values = json.loads(data.decode("utf-8")) if len(data) <= _MAX_BYTES else None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read ({error.strerror}); choose another --output.") from error
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or "model_files" not in values or type(values.get("version", 1)) is not int:
            raise UsageError(f"{self.path} is no manifest of a job; choose another --output.")
        return values


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a manifest as one dictionary, including those of sampling."""
    params = values.get("params")
    inner = params if isinstance(params, dict) else {}
    return {name: value for name, value in {**values, **inner}.items() if name not in (*_NOT_COMPARED, "params")}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return for each setting that differs its old and new value, under the name of its flag."""
    unset = json.loads(json.dumps(dataclasses.asdict(SamplingParams())))  # for settings newer than the manifest
    differing = [
        name for name in {**now, **before} if before.get(name, unset.get(name)) != now.get(name, unset.get(name))
    ]
    named = [
        f"{_called(name)} was {_shown(before.get(name))} and is {_shown(now.get(name))}"
        for name in differing[:_MAX_NAMED]
    ]
    return [*named, f"and {len(differing) - _MAX_NAMED} more"] if len(differing) > _MAX_NAMED else named


def _called(name: str) -> str:
    return _CALLED.get(name) or (f"--{name.replace('_', '-')}" if name.isidentifier() else _shown(name))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "not given", True: "on", False: "off"}[value]
    if isinstance(value, str) and re.fullmatch(r"[\w./-]{1,60}", value):
        return value
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
