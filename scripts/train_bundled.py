"""Train the bundled model, or export it with its card from the last checkpoint of its training.

While it trains, `kill PID` saves a checkpoint and ends, the same command resumes, `kill -STOP` and
`kill -CONT` pause and continue; PID is in the file `pid` of the run's folder.
"""

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer

from et_jax.errors import UsageError
from et_jax.models import checkpoint, hub
from et_jax.models.bundled import bundled_folder
from et_jax.training import card, compact, corpus, export, loop, recipe
from et_jax.training.settings import Settings

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "../shared/text/novels/novels.tar.xz"
HARDWARE = "two cores of an AMD EPYC that served other programs too"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipe", choices=["short", "long"], default="short", help="novels alone, or tasks too")
    p.add_argument("--longest", type=int, default=corpus.WINDOW, help="tokens of the last rows: 8192 on a GPU")
    p.add_argument("--corpus", type=Path, default=CORPUS, help="tar archive of .txt files")
    p.add_argument("--folder", type=Path, help="checkpoints, log, cached tokens (default runs/RECIPE)")
    p.add_argument("--from", dest="start", help="what to begin with: bundled, a model's folder, or what --keep wrote")
    p.add_argument("--steps", type=int, help="train this many steps in all: the reproducible way")
    p.add_argument("--minutes", type=float, help="train as many steps as fit into this wall time")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--export", type=Path, nargs="?", const=bundled_folder(), help="write the model's folder instead")
    p.add_argument("--keep", type=Path, help="write the last checkpoint there in few bytes instead, to go on from")
    p.add_argument("--hardware", default=HARDWARE, help="what the model card says the training ran on")
    p.add_argument("--history", default="", help="a paragraph for the model card: how these weights came about")
    p.add_argument("--accuracy", type=Path, help="for the model card: what `python -m et_jax.evaluate --json` wrote")
    return p


def _start(name: str, settings: Settings) -> tuple[tuple[loop.TrainState, int], Tokenizer]:
    """The state to begin with, and the tokenizer that belongs to it."""
    bundled = bundled_folder()
    if compact.is_state(Path(name)):
        return compact.read(Path(name), settings), Tokenizer.from_file(str(bundled / "tokenizer.json"))
    source = bundled if name == "bundled" else hub.resolve(name)
    weights = checkpoint.load(source)[1]
    return loop.start_from(weights, settings), Tokenizer.from_file(str(source / "tokenizer.json"))


def main() -> None:
    """Parse the arguments and train or export."""
    args = parser().parse_args()
    folder = args.folder or ROOT / "runs" / args.recipe
    try:
        settings = recipe.settings(args.recipe, args.seed, args.longest)
        start, tokenizer = _start(args.start, settings) if args.start else (None, None)
        tokenizer, train_tokens, held_out = corpus.prepare(args.corpus, folder / "data", recipe.VOCAB_SIZE, tokenizer)
        if args.keep is not None:
            size = compact.write(*loop.load_state(folder, settings), args.keep)
            print(f"{args.keep}: {size / 1e6:.1f} MB")
            return
        if args.export is None:
            loop.train(
                settings, train_tokens, held_out, folder, args.steps, args.minutes, tokenizer=tokenizer, start=start
            )
            return
        params, step = loop.load_params(folder, settings)
        size = export.export(params, settings.model, tokenizer, args.export)
        figures = card.measure(params, settings, held_out)
        run = card.Run(folder=folder, step=step, hardware=args.hardware, history=args.history, accuracy=args.accuracy)
        card.write_card(figures, settings, run, held_out, args.export / "README.md")
        print(f"{args.export}: step {step}, {size / 1e6:.2f} MB, {figures.per_token} nats per token by row length")
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
