"""Train a small mixture of experts, or the dense model it is compared with, on novels; or export one of them.

    python -m scripts.train_experts experts --corpus novels.tar.xz --steps 250
    python -m scripts.train_experts dense --corpus novels.tar.xz --steps 250
    python -m scripts.train_experts experts --corpus novels.tar.xz --export models/experts

Both read the same tokens in the same order, as the bundled tokenizer makes them, and begin with random layers and the
same embedding, the principal directions of the bundled model's. While one trains, `kill PID` saves a
checkpoint and ends, and the same command resumes; PID is in the file `pid` of the run's folder.
"""

import argparse
import sys
from pathlib import Path

from et_jax.errors import UsageError
from et_jax.models.bundled import bundled_folder
from et_jax.training import corpus, distillation, export, loop, recipe
from scripts.measuring import arguments

RUNS = Path(__file__).parents[1] / "runs"
MODELS = {"experts": recipe.experts_config, "dense": recipe.dense_config}


def main() -> None:
    """Parse the arguments and train or export."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=MODELS)
    p.add_argument("--corpus", type=Path, required=True, help="tar archive of .txt files")
    p.add_argument("--folder", type=Path, default=RUNS / "experts", help="checkpoints, logs, tokens (runs/experts)")
    p.add_argument("--steps", type=arguments.count(), default=250, help="in all (default 250)")
    p.add_argument("--seed", type=arguments.count(0), default=0)
    p.add_argument("--export", type=Path, help="write the model's folder instead")
    args = p.parse_args()
    settings, run = recipe.compared_settings(MODELS[args.model](), args.seed), args.folder / args.model
    try:
        teacher, own = distillation.read_teacher(bundled_folder(), settings)
        tokenizer, train, held_out = corpus.prepare(args.corpus, args.folder / "data", recipe.VOCAB_SIZE, own)
        if args.export is None:
            start = loop.start_beside(teacher, settings)
            loop.train(settings, train, held_out, run, args.steps, None, start=start)
            return
        params, step = loop.load_params(run, settings)
        size = export.export(params, settings.model, tokenizer, args.export)
        print(f"{args.export}: step {step}, {size / 1e6:.2f} MB")
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
