"""Score the held-out works with a 5-gram model of the same tokens, beside which the bundled model is read."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from et_jax.errors import UsageError
from et_jax.io.files import replace_file
from et_jax.training import corpus, ngram
from et_jax.training.recipe import VOCAB_SIZE
from scripts.measuring import arguments

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Parse the arguments, fit the model, score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "../shared/text/novels/novels.tar.xz", help="tar of .txt files"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/short", help="cached tokens; ngram.json goes there")
    parser.add_argument("--order", type=arguments.count(), default=5)
    args = parser.parse_args()
    try:
        _, train, held_out = corpus.prepare(args.corpus, args.folder / "data", VOCAB_SIZE)
        model = ngram.fit(train.ids, VOCAB_SIZE, args.order, corpus.END_ID)
    except UsageError as error:
        sys.exit(str(error))
    grams = ngram.pack(held_out.ids, args.order, model.bits, corpus.END_ID)
    nats = -np.log(ngram.probabilities(model, grams)).sum()
    figures = {
        "order": args.order,
        "train_tokens": len(train.ids),
        "held_out_tokens": len(held_out.ids),
        "per_token": nats / len(held_out.ids),
        "per_byte": nats / held_out.num_bytes,
    }
    replace_file(args.folder / "ngram.json", json.dumps(figures, indent=1) + "\n")
    print(f"{args.order}-gram, held out: {figures['per_token']:.4f} nats per token, {figures['per_byte']:.4f} per byte")


if __name__ == "__main__":
    main()
