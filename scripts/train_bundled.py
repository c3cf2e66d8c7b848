"""Train a bundled model, or export it with its card from the last checkpoint of its training.

While it trains, `kill PID` saves a checkpoint and ends, the same command resumes, `kill -STOP` and
`kill -CONT` pause and continue; PID is in the file `pid` of the run's folder.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.models import checkpoint, hub
from et_jax.models.bundled import bundled_folder
from et_jax.training import card, compact, corpus, distillation, export, loop, ngram, recipe, student_card
from et_jax.training.distillation import Teacher
from et_jax.training.settings import Settings

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "../shared/text/novels/novels.tar.xz"
RECIPES = "novels alone, tasks too, or the small model from a teacher"
OWN = Path("own")  # what --export means by itself: the folder in the package
HARDWARE = "two cores of an AMD EPYC that served other programs too"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipe", choices=["short", "long", "small"], default="short", help=RECIPES)
    p.add_argument("--teacher", help="whose distributions --recipe small learns: bundled, or a model's folder")
    p.add_argument("--longest", type=int, default=corpus.WINDOW, help="tokens of the last rows: 8192 on a GPU")
    p.add_argument("--corpus", type=Path, default=CORPUS, help="tar archive of .txt files")
    p.add_argument("--folder", type=Path, help="checkpoints, log, cached tokens (default runs/RECIPE)")
    p.add_argument("--from", dest="start", help="what to begin with: bundled, a model's folder, or what --keep wrote")
    p.add_argument("--steps", type=int, help="train this many steps in all: the reproducible way")
    p.add_argument("--minutes", type=float, help="train as many steps as fit into this wall time")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--export", type=Path, nargs="?", const=OWN, help="write the model's folder instead")
    p.add_argument("--yardstick", action="store_true", help="fit the 5-gram model that the card compares with instead")
    p.add_argument("--keep", type=Path, help="write the last checkpoint there in few bytes instead, to go on from")
    p.add_argument("--hardware", default=HARDWARE, help="what the model card says the training ran on")
    p.add_argument("--history", default="", help="a paragraph for the model card: how these weights came about")
    p.add_argument("--accuracy", type=Path, help="for the model card: what `python -m et_jax.evaluate --json` wrote")
    return p


def _yardstick(folder: Path, train: corpus.Tokens, held_out: corpus.Tokens) -> None:
    """Score the held-out works with a 5-gram model of the same tokens, beside which the card shows the model."""
    order = 5
    model = ngram.fit(train.ids, recipe.VOCAB_SIZE, order, corpus.END_ID)
    grams = ngram.pack(held_out.ids, order, model.bits, corpus.END_ID)
    nats = -np.log(ngram.probabilities(model, grams)).sum()
    figures = {"order": order, "train_tokens": len(train.ids), "held_out_tokens": len(held_out.ids)}
    figures |= {"per_token": nats / len(held_out.ids), "per_byte": nats / held_out.num_bytes}
    replace_file(folder / "ngram.json", json.dumps(figures, indent=1) + "\n")
    print(figures)


def _start(name: str, settings: Settings) -> tuple[tuple[loop.TrainState, int], Tokenizer]:
    """The state to begin with, and the tokenizer that belongs to it."""
    if compact.is_state(Path(name)):
        return compact.read(Path(name), settings), corpus.read_tokenizer(bundled_folder())
    source = hub.resolve(name)
    weights = checkpoint.load(source)[1]
    return loop.start_from(weights, settings), corpus.read_tokenizer(source)


def _teacher(name: str | None, settings: Settings, own: list[Path | None]) -> tuple[Teacher | None, Tokenizer | None]:
    """The teacher and its tokenizer, None for a recipe without one; `own` are the folders of the student."""
    if settings.distilled != (name is not None):
        raise UsageError("Only --recipe small learns from a teacher, and it needs one: give it --teacher bundled.")
    if name is None:
        return None, None
    folder = hub.resolve(name)
    if any(one is not None and one.resolve() == folder.resolve() for one in own):
        raise UsageError(f"The teacher {name} is the student's own folder; give the model that it shall learn from.")
    return distillation.read_teacher(folder, settings)


def main() -> None:
    """Parse the arguments and train or export."""
    args = parser().parse_args()
    folder = args.folder or ROOT / "runs" / args.recipe
    own = bundled_folder("bundled-small" if args.recipe == "small" else "bundled")
    target = own if args.export is OWN else args.export
    try:
        settings = recipe.settings(args.recipe, args.seed, args.longest)
        teacher, taught = _teacher(args.teacher, settings, [target or own, args.start and hub.resolve(args.start)])
        start, tokenizer = _start(args.start, settings) if args.start else (None, taught)
        tokenizer, train_tokens, held_out = corpus.prepare(args.corpus, folder / "data", recipe.VOCAB_SIZE, tokenizer)
        if taught is not None:
            distillation.check_tokens(taught, tokenizer)
        if teacher is not None and start is None:
            start = loop.start_beside(teacher, settings)
        if args.yardstick:
            _yardstick(folder, train_tokens, held_out)
            return
        if args.keep is not None:
            size = compact.write(*loop.load_state(folder, settings), args.keep)
            print(f"{args.keep}: {size / 1e6:.1f} MB")
            return
        if target is None:
            given = {"tokenizer": tokenizer, "start": start, "teacher": teacher}
            loop.train(settings, train_tokens, held_out, folder, args.steps, args.minutes, **given)
            return
        params, step = loop.load_params(folder, settings)
        run = card.Run(folder=folder, step=step, hardware=args.hardware, history=args.history, accuracy=args.accuracy)
        size = export.export(params, settings.model, tokenizer, target)
        if teacher is not None:
            figures = student_card.measure(params, settings, teacher, held_out, tokenizer)
            student_card.write_card(figures, settings, run, held_out, target / "README.md")
        else:
            card.write_card(card.measure(params, settings, held_out), settings, run, held_out, target / "README.md")
        print(f"{target}: step {step}, {size / 1e6:.2f} MB")
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
