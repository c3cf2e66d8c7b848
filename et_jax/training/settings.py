"""The settings of a training run: everything that determines its numbers, and how often it reports and saves."""

import dataclasses

from et_jax.models.config import ModelConfig
from et_jax.training import corpus
from et_jax.training.mixture import Mixture
from et_jax.training.schedule import Curriculum, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines a run's numbers, and how often it reports and saves (in steps).

    `mixture` None trains on the corpus only. With one, every evaluation also runs `probed_rows` examples of
    each task, of the length of the step's rows but at most `probed_length`, with `probed_pairs` other keys.
    `evaluated_length` is the tokens per row of the scored held-out text, None for those of the step's rows.
    A `distilled` model learns the distributions of a teacher rather than the tokens.
    """

    model: ModelConfig
    schedule: Schedule | Curriculum
    mixture: Mixture | None = None
    distilled: bool = False
    seed: int = 0
    windows_per_step: int = 4  # of corpus.WINDOW tokens
    window: int = corpus.WINDOW
    matrix_rate: float = 0.02  # Muon, for the matrices inside the layers (Jordan et al. 2024)
    other_rate: float = 3e-3  # AdamW, for the embedding and the norms
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    report_every: int = 20
    evaluate_every: int = 200
    save_every: int = 100
    evaluated_tokens: int = 32_768  # tokens of held-out text scored during training
    evaluated_length: int | None = None
    probed_rows: int = 16
    probed_length: int = 512
    probed_pairs: int = 7
