"""Published tasks, read from files of JSON lines: for models with more knowledge than the bundled one.

LongEval (Li et al. 2023), key-value retrieval of Lost in the Middle (Liu et al. 2023), GSM8K (Cobbe et al. 2021).
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.tasks.base import CountTokens, Example, Match

Record = dict[str, Any]
Read = tuple[str, str, float, Match]
"""Prompt, answer, depth, and the kind of match."""


def longeval_lines(record: Record) -> Read:
    """Read a record of lines, each with an id of two words and a number, and the question for one of them."""
    depth = record["random_idx"][1] / max(1, record["num_lines"] - 1)
    return record["prompt"], str(record["expected_number"]), depth, "number"


def longeval_topics(record: Record) -> Read:
    """Read a long conversation on several topics, and the question for the first."""
    return record["prompt"], record["topics"][0], 0.0, "contains"


def lost_in_the_middle(record: Record) -> Read:
    """Read a JSON object of random keys and values, and the question for one of them."""
    pairs = record["ordered_kv_records"]
    depth = [key for key, _ in pairs].index(record["key"]) / max(1, len(pairs) - 1)
    lines = ",\n".join(f' "{key}": "{value}"' for key, value in pairs)
    prompt = f'Find the value of a key in this JSON object.\n\n{{{lines[1:]}}}\n\nKey: "{record["key"]}"\nValue:'
    return prompt, record["value"], depth, "contains"


def gsm8k(record: Record) -> Read:
    """Read a word problem whose answer is a number; it has no depth, which is set to 0."""
    answer = record["answer"].rpartition("####")[2].strip().replace(",", "")
    return f"Question: {record['question']}\nAnswer:", answer, 0.0, "number"


FILES: dict[str, Callable[[Record], Read]] = {
    reader.__name__: reader for reader in (longeval_lines, longeval_topics, lost_in_the_middle, gsm8k)
}


def examples(task: str, path: Path, count: CountTokens, limit: int) -> list[Example]:
    """Return the first `limit` examples of a file of JSON lines, compressed (.gz) or not.

    Raises UsageError for a file that is not there or has other contents.
    """
    found = []
    for number, record in _records(path):
        if len(found) == limit:
            break
        try:
            prompt, answer, depth, match = FILES[task](record)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UsageError(
                f"Line {number} of {path} is no example of {task} ({error!r}); name the file that belongs to the task."
            ) from error
        length = 1 + count(prompt) + count(answer)
        found.append(Example(task=task, prompt=prompt, answer=answer, depth=depth, length=length, match=match))
    if not found:
        raise UsageError(f"{path} holds no example; name a file of JSON lines.")
    return found


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, json.loads(line)
    except FileNotFoundError as error:
        raise UsageError(f"The prompts {path} are not there; name a file of JSON lines with --prompts.") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UsageError(f"The prompts {path} cannot be read ({error}); name a file of JSON lines.") from error
