"""How well entropies from the k likeliest tokens agree with the exact one, on real logits.

    python scripts/measure_estimators.py --case bundled novels.tar.xz --case FOLDER stories.txt

Rows of held-out text at full context; the second half of each row counts (see `calibrate.py`). A tar archive gives the
works held out from the bundled model's training, any other file its stories. The calibrated temperature is fitted on
the same logits and only shown.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.control import entropy
from et_jax.evidence import tables
from et_jax.serve.engine import load
from et_jax.tasks.calibration import fit_temperature
from scripts.measuring import arguments
from scripts.measuring.results import write
from scripts.measuring.text import held_out_logits, rows

LISTED = (4, 16, 64)


def estimators() -> dict[str, entropy.Estimator]:
    """Return what is compared, by name."""
    found: dict[str, entropy.Estimator] = {}
    for k in LISTED:
        found[f"top_k, k = {k}"] = entropy.TopKEstimator(k)
        found[f"tail_corrected, k = {k}, share 1/2"] = entropy.TailCorrectedEstimator(k, 0.5)
        found[f"tail_corrected, k = {k}, share 1"] = entropy.TailCorrectedEstimator(k, 1.0)
    return found


def measure(name: str, text: Path, num_rows: int) -> dict[str, Any]:
    """Return every estimator's agreement with the exact entropy of one model on one text."""
    model = load(name, dtype="float32", max_num_seqs=2)
    logits, targets = held_out_logits(model, rows(model, text, num_rows, model.config.max_positions))
    moments = entropy.moments(logits)
    truth = entropy.entropy(moments)
    log_prob = jax.nn.log_softmax(logits, axis=-1)
    lines = []
    for estimator, estimate in estimators().items():
        agreement = jax.jit(lambda z, m, h, estimate=estimate: entropy.agreement(estimate(z, m), h))
        fields = vars(agreement(log_prob, moments, truth))
        lines.append({"estimator": estimator} | {key: float(value) for key, value in fields.items()})
    return {
        "model": Path(name).name,
        "text": text.name,
        "tokens": int(truth.shape[0]),
        "mean_entropy": float(jnp.mean(truth)),
        "calibrated_temperature": float(fit_temperature(logits, targets)),
        "estimators": lines,
    }


def main() -> None:
    parser = arguments.parser(__doc__, "case", results="estimators.json")
    parser.add_argument("--rows", type=arguments.count(), default=8, help="rows of text at full context (default 8)")
    args = parser.parse_args()
    cases = []
    with arguments.refusals("measure_estimators"):
        for name, text in args.case:
            cases.append(measure(name, Path(text), args.rows))
            print(f"\n{tables.estimators(cases[-1:])}", flush=True)
    write(args.output, "scripts/measure_estimators.py", {"rows": args.rows, "dtype": "float32"}, cases=cases)


if __name__ == "__main__":
    main()
