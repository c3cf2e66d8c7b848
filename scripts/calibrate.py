"""Measure a model on held-out text: its calibrated temperature, and how sensitive it is to each of its heads.

    python -m scripts.calibrate --model MODEL --text FILE [--output FOLDER]

Rows of held-out text at the model's full context pass through it. The temperature minimises the negative log-likelihood
of their second halves (ETI section 5; Guo et al. 2017); the decoder then measures its raw entropy at it. Where it saves
less than a thousandth of a nat a token it stays 1, which spares every step a pass over the vocabulary. The sensitivity
says what an error in each head's output costs in nats, by gradients on the same second halves; control "adaptive" reads
by it. Both are kept in calibration.json beside the model. A tar archive gives the works held out from the bundled
model's training, any other file its stories.
"""

import sys
from pathlib import Path

from et_jax.errors import UsageError
from et_jax.io.files import check_writable
from et_jax.models.calibration import FILE, Calibration, write_calibration
from et_jax.models.hub import resolve
from et_jax.serve.engine import load
from et_jax.tasks.calibration import fit_temperature, head_sensitivity, negative_log_likelihood
from et_jax.types import Table
from scripts.measuring import arguments
from scripts.measuring.text import held_out_logits, rows, texts

WORTH = 1e-3  # nats a token that a temperature must save


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "--model", default="bundled", help="bundled, bundled-small, a Hugging Face folder, or a hub name"
    )
    parser.add_argument("--text", required=True, type=Path, help="a tar archive of works, or a file of stories")
    parser.add_argument(
        "--output", type=arguments.folder, help="folder for calibration.json (default: the model's own)"
    )
    parser.add_argument("--rows", type=arguments.count(), default=16, help="rows of full context (default 16)")
    args = parser.parse_args()
    try:
        folder = resolve(args.model) if args.output is None else args.output
        check_writable(folder / FILE)
        texts(args.text)  # refused before a model is loaded
        model = load(args.model, dtype="float32", max_num_seqs=2)
        if any(model.config.windows):
            raise UsageError("This script attends over whole rows; a model with sliding windows needs another.")
        given = rows(model, args.text, args.rows, model.config.max_positions)
        logits, targets = held_out_logits(model, given)
        temperature = float(fit_temperature(logits, targets))
        sensitivity = head_sensitivity(model.config, model.params, given, model.config.max_positions // 2)
        before, after = (float(negative_log_likelihood(logits, targets, t)) for t in (1.0, temperature))
        if before - after < WORTH:
            temperature, after = 1.0, before
        facts = {"text": args.text.name, "tokens": int(targets.shape[0])}
        facts |= {"nats_per_token_at_1": round(before, 5), "nats_per_token": round(after, 5)}
        found = Calibration(temperature=temperature, sensitivity=Table(sensitivity))
        path = write_calibration(folder, found, facts)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"temperature {temperature:.4f}: {before:.4f} -> {after:.4f} nats per token")
    for number, layer in enumerate(sensitivity):
        print(f"layer {number}: nats a squared error in a head's output from {layer.min():.4g} to {layer.max():.4g}")
    print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
