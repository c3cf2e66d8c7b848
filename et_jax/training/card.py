"""The model card: measures a checkpoint on all held-out text and writes the results."""

import dataclasses
import itertools
import json
import string
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.models.params import Params, num_weights
from et_jax.training import corpus
from et_jax.training.loop import evaluate
from et_jax.training.schedule import Curriculum
from et_jax.training.settings import Settings

SHORT_STEPS = 2070  # of the first training, on novels only, which the one for long contexts continues
BUCKETS = (0, 16, 64, 256, 512, 1024, 1536, 2048)  # positions between which the loss is averaged

CARD = string.Template("""\
---
license: apache-2.0
language: en
library_name: et_jax
pipeline_tag: text-generation
---

# $title

$introduction
## Shape

Llama (`LlamaForCausalLM`): $layers, $heads, feed-forward $ffn, tied embedding, $weights weights in
bfloat16. Byte-level BPE of $vocab tokens, $bytes bytes per token on held-out text. Context $context positions, rotary
base $base. $end stands before every prompt and behind every work.

## Data

$works public-domain English works, most of them novels of 1837 to 1928: ELTeC-eng, 100 English Novels and
two books of Standard Ebooks. Held out as whole works, by the hash of the file name: $held_out.
Some of their authors wrote works that were trained on.

## Training

$passed, in $hours hours on $hardware.
$rows Muon at $matrix_rate on the layers'
matrices, AdamW at $other_rate on the rest, constant after $warmup steps and falling to zero over the last
$decay; bfloat16 products, float32 sums and master weights.
$history
To make it again, from the works as a tar archive of .txt files:

$commands

$measured## Limits

$limits
## Licence

Weights: Apache-2.0. The texts are in the public domain.
""")


INTRODUCTION = """\
A small language model of English novels, so that et_jax decodes something real without a download.
It is for trying the decoder out and for its tests; it knows no facts and follows no instructions.
"""

HELD_OUT = string.Template("""\
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

""")

LIMITS = string.Template("""\
It writes in the voice of its century, with that century's prejudices. It keeps a sentence together and a
scene only loosely. It almost never ends a text: only the last token of each work taught it to. Many of the
works have hard line breaks, so it sometimes breaks a line in mid-sentence. Beyond $context positions it is
untrained.
""")

RECALL = string.Template("""\
## What it finds again

Right answers, greedy, to tasks of the test split, whose names, words and passages it was not trained on
(`python -m et_jax.evaluate`; $examples examples a cell or more; the depth is where in the text the answer stands):

$table

Text around the answers: $hay. Chance is one in five for counting and next to nothing for the others. Questions are
understood in the words of `et_jax.tasks` only.

""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Held-out losses: nats per token by row length and, in rows of the longest, between positions."""

    per_token: dict[int, float]
    by_position: dict[tuple[int, int], float]


def measure(params: Params, settings: Settings, held_out: corpus.Tokens) -> Figures:
    """Score every held-out token twice, in short and in long rows."""
    lengths = settings.schedule.lengths
    per_token, by_position = {}, {}
    for length in (lengths[0], lengths[-1]):
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
    """Return the wall time in a log, hours, summed over resumed runs."""
    minutes = [json.loads(line)["minutes"] for line in log.read_text().splitlines()]
    ends = [now for now, later in zip(minutes, [*minutes[1:], 0.0], strict=True) if later < now]
    return sum(ends) / 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its folder, its last step, its hardware, and further facts for the card.

    `history` is a paragraph, or empty; `accuracy` is the output of `et_jax.evaluate --json` for the model, or None.
    """

    folder: Path
    step: int
    hardware: str
    history: str = ""
    accuracy: Path | None = None


def write_card(figures: Figures, settings: Settings, run: Run, held_out: corpus.Tokens, card: Path) -> None:
    """Write the model card; the baseline is read from `ngram.json` in the run's folder."""
    yardstick = run.folder / "ngram.json"
    if not yardstick.exists():
        raise UsageError(
            f"{yardstick} is not there; run scripts/train_bundled.py --yardstick, which the model card compares with."
        )
    ngram = json.loads(yardstick.read_text())
    recall = "" if run.accuracy is None else _recall(json.loads(run.accuracy.read_text()))
    measured = recall + HELD_OUT.substitute(_losses(figures, settings, held_out, ngram))
    limits = LIMITS.substitute(context=settings.model.max_positions)
    own = {"title": "The bundled model", "introduction": INTRODUCTION, "measured": measured, "limits": limits}
    replace_file(card, CARD.substitute(texts(settings, run, held_out) | own))


def texts(settings: Settings, run: Run, held_out: corpus.Tokens) -> dict[str, str]:
    """Return the texts of any card on the model's shape, its data and its training."""
    facts = {side: json.loads((run.folder / "data" / f"{side}.json").read_text()) for side in ("train", "held_out")}
    model = settings.model
    return _training(settings, run, facts["train"]["starts"][-1]) | {
        "layers": f"{model.num_layers} layers of width {model.hidden_size}",
        "heads": f"{model.num_heads} query heads on {model.num_kv_heads} key-value heads of {model.head_dim}",
        "ffn": str(model.intermediate_size),
        "weights": f"{num_weights(model):,}",
        "vocab": str(model.vocab_size),
        "bytes": f"{held_out.num_bytes / len(held_out.ids):.2f}",
        "context": str(model.max_positions),
        "base": f"{model.rope_theta:,.0f}",
        "end": f"`{corpus.END_OF_TEXT}` (id {corpus.END_ID})",
        "works": str(sum(len(side["works"]) for side in facts.values())),
        "held_out": ", ".join(Path(name).stem for name in facts["held_out"]["works"]),
    }


def _losses(figures: Figures, settings: Settings, held_out: corpus.Tokens, ngram: dict[str, Any]) -> dict[str, str]:
    """Return the card's figures on the loss on held-out text."""
    ratio = len(held_out.ids) / held_out.num_bytes
    longest = settings.schedule.lengths[-1]
    nats = figures.per_token[longest]
    gain = ngram["per_token"] - nats
    return {
        "corpus": f"{ngram['train_tokens'] / 1e6:.1f} M",
        "long": str(longest),
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


def _training(settings: Settings, run: Run, num_tokens: int) -> dict[str, str]:
    """Return the card's texts on data, rows and rates."""
    schedule, mixture = settings.schedule, settings.mixture
    per_step = settings.windows_per_step * settings.window
    tokens = run.step * per_step / 1e6
    passed = f"{tokens:.1f} M tokens in {run.step} steps"
    if mixture is None:
        passed += f", {run.step * per_step / num_tokens:.2f} passes over {num_tokens / 1e6:.1f} M"
    else:
        novels = sum(mixture.num_novels(step, settings.windows_per_step) for step in range(run.step))
        share = novels / (run.step * settings.windows_per_step)
        passed += f" of {per_step}, {share:.0%} of them novels and the rest tasks made by `et_jax.tasks`"
    if isinstance(schedule, Curriculum):
        stages = ", ".join(f"{length} from step {begin}" for begin, length in schedule.stages if begin < run.step)
        rows, decay = f"Tokens per row: {stages}.", f"{schedule.decay_steps} steps"
    else:
        rows = f"Rows of {schedule.short_length} tokens, of {schedule.long_length} in the last "
        rows += f"{schedule.long_share:.0%} of the steps."
        decay = f"{schedule.decay_share:.0%}"
    return {
        "passed": passed,
        "hours": f"{hours(run.folder / 'log.jsonl'):.1f}",
        "hardware": run.hardware,
        "rows": rows,
        "decay": decay,
        "warmup": str(schedule.warmup),
        "matrix_rate": str(settings.matrix_rate),
        "other_rate": str(settings.other_rate),
        "history": f"\n{run.history}\n" if run.history else "",
        "commands": "\n".join(f"    python -m scripts.{line}" for line in _commands(settings, run.step)),
    }


def _commands(settings: Settings, step: int) -> list[str]:
    train = "train_bundled --corpus novels.tar.xz"
    ngram = f"{train} --yardstick --recipe "
    if settings.distilled:
        student = f"{train} --recipe small --teacher bundled"
        return [f"{student} --steps {step} --seed {settings.seed}", f"{student} --export"]
    if settings.mixture is None:
        return [f"{ngram}short", f"{train} --steps {step} --seed {settings.seed}", f"{train} --export"]
    return [
        f"{ngram}short",
        f"{train} --steps {SHORT_STEPS}",
        f"{train} --export runs/short/model",
        f"{train} --recipe long --from runs/short/model --steps {step} --seed {settings.seed}",
        f"{ngram}long",
        f"{train} --recipe long --export",
    ]


def _recall(report: dict[str, Any]) -> str:
    """Return the card's section on tasks, from the output of `et_jax.evaluate --json`."""
    rows = report["summary"]
    depths = sorted({row["depth"] for row in rows})
    lines = [f"| task | length | all | {' | '.join(f'depth {depth:g}' for depth in depths)} |"]
    lines.append("| --- | --- | --- |" + " --- |" * len(depths))
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        cells = {row["depth"]: row for row in rows if (row["task"], row["length"]) == (task, length)}
        total = sum(row["examples"] for row in cells.values())
        right = sum(row["examples"] * row["accuracy"] for row in cells.values()) / total
        shown = " | ".join(f"{cells[depth]['accuracy']:.2f}" if depth in cells else "" for depth in depths)
        lines.append(f"| {task} | {length} | {right:.2f} | {shown} |")
    examples = min(row["examples"] for row in rows)
    return RECALL.substitute(table="\n".join(lines), examples=str(examples), hay=report["haystack"])
