"""Completions as a decoder might have made them, for what shows them."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from et_jax.cli.streams import open_text
from et_jax.report.trace import About, TraceWriter
from et_jax.serve.completions import Completion, TokenEvent, TokenTrace
from et_jax.serve.totals import Totals

WORDS = (" It", " was", " the", " best", " of", " times", ",", " <b>", " &amp;", " worst", "\n", "", " </script>")


def sample(tokens: int, *, seed: int = 0, drafts: bool = False, switched: bool = False, **given: Any) -> Completion:
    """Return a completion of so many tokens, whose figures are drawn from `seed`."""
    rng, time, rows = random.Random(seed), 0.0, []
    for i in range(tokens):
        entropy = abs(rng.gauss(1.5, 1.5))
        time += entropy
        rows.append(
            TokenTrace(
                token=i % 500,
                text=rng.choice(WORDS),
                entropy=entropy,
                varentropy=entropy**2 / 2,
                temperature=0.7 + 0.1 * math.sin(i / 20),
                surprisal=max(0.0, rng.gauss(entropy, 1)),
                blocks_read=(read := rng.randint(3, 6) * 10),
                blocks_held=60,
                kept_mass=1 - rng.random() / 10,
                attention_entropy=rng.random(),
                least_attention_entropy=0.0,
                entropic_time=time,
                cost=3e6 * (1 + rng.random()),
                flops=1e7,
                guard_rates={"stability": 0.1, "temperature_saturation": i / tokens},
                drafted=4 * (drafts and i % 3 == 0),
                accepted=drafts and i % 3 != 2,
                by_small=(i // 30) % 2 == 0 if switched else None,
                reads=tuple((read // 10, read // 10) for _ in range(5)),
                top=tuple((rng.randint(0, 500), math.log(share)) for share in (0.5, 0.2, 0.1, 0.05, 0.01)),
            )
        )
    settings: dict[str, Any] = {"prompt": "A <b>prompt</b>", "prompt_tokens": 4, "index": 0, "finish_reason": "length"}
    settings |= {"text": "".join(row.text for row in rows), "token_ids": tuple(row.token for row in rows)}
    return Completion(**settings | {"trace": tuple(rows)} | given)


def row(number: int, completions: Sequence[Completion], **changes: Any) -> dict[str, Any]:
    choices = [{"index": i, "text": one.text, "finish_reason": "length"} for i, one in enumerate(completions)]
    usage = {"prompt_tokens": 4, "completion_tokens": sum(len(one.token_ids) for one in completions)}
    body = {"choices": choices, "usage": usage, "entropic": Totals.of(completions).to_dict()}
    response = {"status_code": 200, "body": body}
    return {"id": f"batch_req_{number}", "custom_id": f"r{number}", "response": response, "error": None} | changes


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def traced(path: Path, model: str = "bundled", done: Completion | None = None) -> Path:
    """The trace of a run, of 20 tokens by default."""
    done = done or sample(20)
    about = About(model=model, control="off", n=1, prompt=done.prompt, prompt_tokens=done.prompt_tokens)
    with open_text(str(path)) as stream:
        writer = TraceWriter(stream, about)
        for i, token in enumerate(done.trace):
            ended = done if i + 1 == len(done.trace) else None
            writer.take(TokenEvent(prompt_index=0, index=0, text=token.text, trace=token, completion=ended))
    return path
