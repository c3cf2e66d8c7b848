"""Train the bundled model, or export it with its card from the last checkpoint of its training.

While it trains, `kill PID` saves a checkpoint and ends, the same command resumes, `kill -STOP` and
`kill -CONT` pause and continue; PID is in the file `pid` of the run's folder.
"""

import argparse
import sys
from pathlib import Path

from et_jax.models.bundled import bundled_folder
from et_jax.training import card, corpus, export, loop
from et_jax.training.recipe import VOCAB_SIZE, bundled_settings
from et_jax.types import UsageError

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "../shared/text/novels/novels.tar.xz"
HARDWARE = "two cores of an AMD EPYC that served other programs too"


def main() -> None:
    """Parse the arguments and train or export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="tar archive of .txt files")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/bundled", help="checkpoints, log, cached tokens")
    parser.add_argument("--steps", type=int, help="train this many steps in all: the reproducible way")
    parser.add_argument("--minutes", type=float, help="train as many steps as fit into this wall time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--export", type=Path, nargs="?", const=bundled_folder(), help="write the model's folder instead"
    )
    parser.add_argument("--hardware", default=HARDWARE, help="what the model card says the training ran on")
    args = parser.parse_args()
    settings = bundled_settings(args.seed)
    try:
        tokenizer, train_tokens, held_out = corpus.prepare(args.corpus, args.folder / "data", VOCAB_SIZE)
        if args.export is None:
            loop.train(settings, train_tokens, held_out, args.folder, args.steps, args.minutes)
            return
        params, step = loop.load_params(args.folder, settings)
        size = export.export(params, settings.model, tokenizer, args.export)
        figures = card.measure(params, settings, held_out)
        card.write_card(figures, settings, step, held_out, args.folder, args.hardware, args.export / "README.md")
        print(f"{args.export}: step {step}, {size / 1e6:.2f} MB, {figures.per_token} nats per token by row length")
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
