"""Regular expressions of a tokenizer.json: unknown ones are tested before they are used."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.text.worker import Stopped, Worker

SECONDS = 9.0  # to test all expressions of a tokenizer
MAX_CHARACTERS = 10_000  # of its expressions together

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_CASELESS = f"(?i:{_CONTRACTIONS})"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WELL_KNOWN = {
    " ",
    r"\s",
    r"\s+",
    r"\p{N}",
    r"\s+$",  # DeepSeek LLM; quadratic in a run of spaces, which is seconds for 20,000 of them
    rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2
    rf"{_CASELESS}{_WORDS}|\p{{N}}{{1,3}}{_REST}",  # Llama 3
    rf"{_CASELESS}{_WORDS}|\p{{N}}{_REST}",  # Qwen 2 and 3
}


def expressions(parts: Any) -> set[str]:
    """Return the regular expressions in the parts of a tokenizer.json that are not well known."""
    found, waiting = set(), [parts]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("Regex"), str):
                found.add(value["Regex"])
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found - WELL_KNOWN


def check_expressions(file: Path, unknown: Iterable[str]) -> None:
    """Raise UsageError for an expression that is too slow on some text. A worker tests them, if there are any."""
    patterns = sorted(unknown)
    if not patterns:
        return
    if sum(map(len, patterns)) > MAX_CHARACTERS:
        raise UsageError(f"{file} holds regular expressions of more than {MAX_CHARACTERS} characters; fetch it again.")
    worker = Worker("probe.py", {})
    try:
        slow = worker.ask({"patterns": patterns}, SECONDS)["slow"]
    except Stopped:
        slow = patterns[0]
    finally:
        worker.close()
    if slow is not None:
        raise UsageError(
            f"{file} splits texts by {json.dumps(slow)[:100]}, which takes too long on some of them; "
            "use another tokenizer."
        )
