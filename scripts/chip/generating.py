"""`Model.generate` of a real model, several prompts at once: what a step takes with all that surrounds `decode`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.io.texts import read_text
from et_jax.serve.engine import load
from scripts.chip.cases import Case, Settings
from scripts.measuring.timing import seconds

FEWEST = 2  # tokens of the call that is subtracted, with its prefill


def measured(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what is found of each case, in order.

    A step's time is the difference of two calls of the same prompts, of many tokens and of two.
    """
    first = cases[0]
    length = -(-(first.tokens + settings.tokens + 2) // 64) * 64
    model = load(
        settings.model, dtype="bfloat16", max_num_seqs=max(2, first.rows), max_model_len=length, prefix_cache=False
    )
    tokens = model.tokenizer.encode(read_text(settings.text, "The text"))
    if len(tokens) < first.rows * first.tokens:
        raise UsageError(f"--text has {len(tokens)} tokens; give one of {first.rows * first.tokens} or more.")
    prompts = [tokens[row * first.tokens :][: first.tokens] for row in range(first.rows)]
    for case in cases:
        control = "off" if case.control == "off" else preset(case.control, min_context=0)
        found: list[Any] = []

        def run(count: int, control: Any = control, found: list[Any] = found) -> None:
            asked = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "control": control}
            found[:] = model.generate(prompts, **asked)

        run(settings.tokens)
        run(FEWEST)
        rounds = []
        for _ in range(settings.rounds):
            few, many = (seconds(partial(run, count)) for count in (FEWEST, settings.tokens))
            rounds.append(1e3 * (many - few) / (settings.tokens - FEWEST))
        rows = [row for one in found for row in one.trace[FEWEST:]]
        read, held = (sum(getattr(row, name) for row in rows) for name in ("blocks_read", "blocks_held"))
        yield {"milliseconds": rounds, "share_read": read / max(1, held)}
