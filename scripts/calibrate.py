"""Fit the temperature at which a model's probabilities mean what they say, and keep it beside the model.

Held-out text passes through the model in windows of its full context; the temperature minimises the negative
log-likelihood of the second half of every window (ETI section 5; Guo et al. 2017). The decoder then measures its raw
entropy at that temperature.

    python scripts/calibrate.py --model MODEL --text FILE [--output FOLDER]
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.calibration import fit_temperature, negative_log_likelihood
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import write_calibration
from et_jax.models.checkpoint import load, resolve
from et_jax.models.transformer import forward
from et_jax.tokenizer import load_tokenizer
from et_jax.types import UsageError


def windows(tokens: list[int], length: int, count: int) -> np.ndarray:
    """Return `count` windows of `length` tokens, spread evenly over the text."""
    if len(tokens) < length + 1:
        raise UsageError(f"The text has {len(tokens)} tokens; give at least {length + 1}.")
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)


def causal_attend(layer, q, k, v, memory):
    """Return plain causal attention over the window itself."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), memory


def held_out_logits(config, params, batch: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return logits and targets of the second half of every window, where the model has context."""
    length = batch.shape[1] - 1
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def logits_of(tokens):
        return forward(params, config, tokens, positions, causal_attend, None)[0][:, length // 2 :]

    logits = jnp.concatenate([logits_of(row[None, :-1])[0] for row in batch])
    return logits, jnp.asarray(batch[:, 1 + length // 2 :].reshape(-1))


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, a Hugging Face folder, or a hub name")
    parser.add_argument("--text", required=True, type=Path, help="held-out text, UTF-8")
    parser.add_argument("--output", type=Path, help="folder for calibration.json (default: the model's own)")
    parser.add_argument("--windows", type=int, default=16, help="windows of the model's context (default 16)")
    args = parser.parse_args()
    try:
        folder = bundled_folder() if args.model == "bundled" else resolve(args.model)
        config, params = load(folder, "float32")
        if any(config.windows):
            raise UsageError("This script attends over whole windows; a model with sliding windows needs another.")
        tokens = load_tokenizer(folder).encode(args.text.read_text(encoding="utf-8"))
        logits, targets = held_out_logits(config, params, windows(tokens, config.max_positions, args.windows))
    except (UsageError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    temperature = float(fit_temperature(logits, targets))
    before, after = (float(negative_log_likelihood(logits, targets, t)) for t in (1.0, temperature))
    facts = {
        "text": args.text.name,
        "tokens": int(targets.shape[0]),
        "nats_per_token_at_1": round(before, 5),
        "nats_per_token": round(after, 5),
    }
    path = write_calibration(args.output or folder, temperature, facts)
    print(f"temperature {temperature:.4f}: {before:.4f} -> {after:.4f} nats per token; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
