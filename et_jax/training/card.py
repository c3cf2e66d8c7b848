"""The model card: measures a checkpoint on all held-out text and says what was measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from et_jax.models.transformer import Params
from et_jax.training import corpus
from et_jax.training.loop import Settings, evaluate
from et_jax.types import UsageError

BUCKETS = (0, 16, 64, 256, 512, 1024, 1536, 2048)  # positions between which the loss is averaged


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
            for begin, end in zip(edges, edges[1:], strict=False)
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
    c, schedule = settings.model, settings.schedule
    ratio = len(held_out.ids) / held_out.num_bytes
    nats = figures.per_token[schedule.long_length]
    seen = step * settings.windows_per_step * settings.window
    corpus_tokens, shapes = ngram["train_tokens"], f"{c.num_layers} layers of width {c.hidden_size}"
    weights = sum(int(np.prod(leaf.shape)) for leaf in _specs(c))
    rows = "\n".join(f"| {begin} to {end - 1} | {loss:.3f} |" for (begin, end), loss in figures.by_position.items())
    lengths = ", ".join(f"{loss:.3f} in rows of {length}" for length, loss in figures.per_token.items())
    gain = ngram["per_token"] - nats
    verdict = (
        f"The model is {gain:.3f} nats per token better than the {ngram['order']}-gram."
        if gain > 0
        else f"The model does not reach the {ngram['order']}-gram: it is {-gain:.3f} nats per token worse."
    )
    card.write_text(f"""---
license: apache-2.0
language: en
library_name: et_jax
pipeline_tag: text-generation
---

# The bundled model

A small language model of English novels, so that et_jax decodes something real without a download.
It is for trying the decoder out and for its tests; it knows no facts and follows no instructions.

## Shape

Llama (`LlamaForCausalLM`): {shapes}, {c.num_heads} query heads on {c.num_kv_heads} key-value heads of
{c.head_dim}, feed-forward {c.intermediate_size}, tied embedding, {weights:,} weights in bfloat16.
Byte-level BPE of {c.vocab_size} tokens, {1 / ratio:.2f} bytes per token on held-out text. Context {c.max_positions} positions
(rotary base {c.rope_theta:,.0f}). `{corpus.END_OF_TEXT}` (id {corpus.END_ID}) stands before every prompt and behind every work.

## Data

{len(notes["train"]["works"]) + len(notes["held_out"]["works"])} public-domain English works, most of them novels of 1837 to 1928: ELTeC-eng,
100 English Novels and two of Standard Ebooks. Held out as whole works, by the hash of the file name:
{", ".join(Path(name).stem for name in notes["held_out"]["works"])}. Other works by their authors were trained on.

## Training

{seen / 1e6:.1f} M tokens in {step} steps, {seen / corpus_tokens:.2f} passes over {corpus_tokens / 1e6:.1f} M training tokens, in {hours(run / "log.jsonl"):.1f} hours on
{hardware}. Rows of {schedule.short_length} tokens, of {schedule.long_length} in the last {schedule.long_share:.0%} of the steps. Muon at {settings.matrix_rate} on
the layers' matrices, AdamW at {settings.other_rate} on the rest, constant after {schedule.warmup} steps and falling to zero over
the last {schedule.decay_share:.0%}; bfloat16 products, float32 sums and master weights.

To make it again, from the corpus as a tar archive of .txt files:

    python scripts/ngram_baseline.py --corpus novels.tar.xz
    python scripts/train_bundled.py --corpus novels.tar.xz --steps {step} --seed {settings.seed}
    python scripts/train_bundled.py --corpus novels.tar.xz --export

## Held-out loss

All {len(held_out.ids):,} tokens of the held-out works, rows of {schedule.long_length}:

| model | nats per token | nats per byte |
| --- | --- | --- |
| this model | {nats:.3f} | {nats * ratio:.3f} |
| {ngram["order"]}-gram, modified Kneser-Ney, all {corpus_tokens / 1e6:.1f} M training tokens | {ngram["per_token"]:.3f} | {ngram["per_byte"]:.3f} |

{verdict}
By row length: {lengths} tokens. By position in rows of {schedule.long_length}:

| position | nats per token |
| --- | --- |
{rows}

## Limits

It writes in the voice of its century, with that century's prejudices. It keeps a sentence together and a
scene only loosely. It almost never ends a text: only the end of a work taught it to. About half of the
works have hard line breaks, so it sometimes breaks lines in mid-sentence. Beyond {c.max_positions} positions it is untrained.

## Licence

Weights: Apache-2.0. The texts are in the public domain.
""")


def _specs(config):
    import jax

    from et_jax.models.transformer import WeightSpec, describe

    return jax.tree.leaves(describe(config), is_leaf=lambda leaf: isinstance(leaf, WeightSpec))
