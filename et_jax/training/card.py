"""The model card: measures a checkpoint on all held-out text and says what was measured."""

import dataclasses
import itertools
import json
import math
import string
from pathlib import Path

from et_jax.models.checkpoint import weight_specs
from et_jax.models.transformer import Params
from et_jax.training import corpus
from et_jax.training.loop import Settings, evaluate
from et_jax.types import UsageError

BUCKETS = (0, 16, 64, 256, 512, 1024, 1536, 2048)  # positions between which the loss is averaged

TEMPLATE = string.Template("""\
---
license: apache-2.0
language: en
library_name: et_jax
pipeline_tag: text-generation
---

# The bundled model

A small language model of English novels, so that et_jax decodes something real without a download.
It is for trying the decoder out and for its tests; it knows no facts and follows no instructions.

## Shape

Llama (`LlamaForCausalLM`): $layers, $heads, feed-forward $ffn, tied embedding, $weights weights in
bfloat16. Byte-level BPE of $vocab tokens, $bytes bytes per token on held-out text. Context $context positions, rotary
base $base. $end stands before every prompt and behind every work.

## Data

$works public-domain English works, most of them novels of 1837 to 1928: ELTeC-eng, 100 English Novels and
two books of Standard Ebooks. Held out as whole works, by the hash of the file name: $held_out.
Some of their authors wrote works that were trained on.

## Training

$passed over $corpus training tokens, in $hours hours on $hardware.
Rows of $short tokens, of $long in the last $long_share of the steps. Muon at $matrix_rate on the layers'
matrices, AdamW at $other_rate on the rest, constant after $warmup steps and falling to zero over the last
$decay_share; bfloat16 products, float32 sums and master weights.

To make it again, from the works as a tar archive of .txt files:

    python scripts/ngram_baseline.py --corpus novels.tar.xz
    python scripts/train_bundled.py --corpus novels.tar.xz --steps $step --seed $seed
    python scripts/train_bundled.py --corpus novels.tar.xz --export

## Held-out loss

All $tokens tokens of the held-out works, each work cut into rows of $long:

| model | nats per token | nats per byte |
| --- | --- | --- |
| this model | $nats | $nats_per_byte |
| $order-gram, interpolated modified Kneser-Ney, all $corpus training tokens | $ngram | $ngram_per_byte |

The model is $verdict the $order-gram.

By length of the rows: $lengths tokens. By position in rows of $long:

| position | nats per token |
| --- | --- |
$positions

## Limits

It writes in the voice of its century, with that century's prejudices. It keeps a sentence together and a
scene only loosely. It almost never ends a text: only the last token of each work taught it to. Many of the
works have hard line breaks, so it sometimes breaks a line in mid-sentence. Beyond $context positions it is
untrained.

## Licence

Weights: Apache-2.0. The texts are in the public domain.
""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Held-out losses: nats per token by row length and, in rows of the longest, between positions."""

    per_token: dict[int, float]
    by_position: dict[tuple[int, int], float]


def measure(params: Params, settings: Settings, held_out: corpus.Tokens) -> Figures:
    """Score every held-out token twice, in short and in long rows."""
    schedule = settings.schedule
    per_token, by_position = {}, {}
    for length in (schedule.short_length, schedule.long_length):
        rows = corpus.held_out_rows(held_out, length)
        losses = evaluate(params, settings, rows)
        per_token[length] = float(losses.sum() / rows.target_mask.sum())
        edges = [edge for edge in BUCKETS if edge < length] + [length]
        by_position = {
            (begin, end): float(losses[:, begin:end].sum() / rows.target_mask[:, begin:end].sum())
            for begin, end in itertools.pairwise(edges)
        }
    return Figures(per_token=per_token, by_position=by_position)


def hours(log: Path) -> float:
    """Return the wall time that a log tells of, hours, summed over the times that the run was resumed."""
    minutes = [json.loads(line)["minutes"] for line in log.read_text().splitlines()]
    ends = [now for now, later in zip(minutes, [*minutes[1:], 0.0], strict=True) if later < now]
    return sum(ends) / 60


def write_card(
    figures: Figures, settings: Settings, step: int, held_out: corpus.Tokens, run: Path, hardware: str, card: Path
) -> None:
    """Write the model card; the yardstick is read from `ngram.json` in the run's folder."""
    yardstick = run / "ngram.json"
    if not yardstick.exists():
        raise UsageError(
            f"{yardstick} is not there; run scripts/ngram_baseline.py first, the model card compares with it."
        )
    ngram = json.loads(yardstick.read_text())
    notes = {side: json.loads((run / "data" / f"{side}.json").read_text()) for side in ("train", "held_out")}
    model, schedule = settings.model, settings.schedule
    ratio = len(held_out.ids) / held_out.num_bytes
    nats = figures.per_token[schedule.long_length]
    gain = ngram["per_token"] - nats
    passed = step * settings.windows_per_step * settings.window
    texts = {
        "layers": f"{model.num_layers} layers of width {model.hidden_size}",
        "heads": f"{model.num_heads} query heads on {model.num_kv_heads} key-value heads of {model.head_dim}",
        "ffn": str(model.intermediate_size),
        "weights": f"{sum(math.prod(spec.shape) for spec in weight_specs(model).values()):,}",
        "vocab": str(model.vocab_size),
        "bytes": f"{1 / ratio:.2f}",
        "context": str(model.max_positions),
        "base": f"{model.rope_theta:,.0f}",
        "end": f"`{corpus.END_OF_TEXT}` (id {corpus.END_ID})",
        "works": str(sum(len(side["works"]) for side in notes.values())),
        "held_out": ", ".join(Path(name).stem for name in notes["held_out"]["works"]),
        "passed": f"{passed / 1e6:.1f} M tokens in {step} steps, {passed / ngram['train_tokens']:.2f} passes",
        "corpus": f"{ngram['train_tokens'] / 1e6:.1f} M",
        "hours": f"{hours(run / 'log.jsonl'):.1f}",
        "hardware": hardware,
        "short": str(schedule.short_length),
        "long": str(schedule.long_length),
        "long_share": f"{schedule.long_share:.0%}",
        "decay_share": f"{schedule.decay_share:.0%}",
        "warmup": str(schedule.warmup),
        "matrix_rate": str(settings.matrix_rate),
        "other_rate": str(settings.other_rate),
        "step": str(step),
        "seed": str(settings.seed),
        "tokens": f"{len(held_out.ids):,}",
        "nats": f"{nats:.3f}",
        "nats_per_byte": f"{nats * ratio:.3f}",
        "order": str(ngram["order"]),
        "ngram": f"{ngram['per_token']:.3f}",
        "ngram_per_byte": f"{ngram['per_byte']:.3f}",
        "verdict": f"{abs(gain):.3f} nats per token {'better' if gain > 0 else 'worse'} than",
        "lengths": ", ".join(f"{loss:.3f} in rows of {length}" for length, loss in figures.per_token.items()),
        "positions": "\n".join(
            f"| {begin} to {end - 1} | {loss:.3f} |" for (begin, end), loss in figures.by_position.items()
        ),
    }
    card.write_text(TEMPLATE.substitute(texts), encoding="utf-8")
