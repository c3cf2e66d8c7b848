"""Models to measure on, as shapes: weights are drawn at random where any are needed."""

import dataclasses

import numpy as np

from et_jax.models.calibration import Calibration
from et_jax.models.config import ModelConfig
from et_jax.types import Table
from scripts.measuring.experiment import Base, setting

# Two layers that compile in a moment, with two query heads on each KV head.
SMALL = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    windows=(None, None),
)
# Allal et al. 2024
SMOLLM_135M = ModelConfig(
    architecture="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=2048,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    windows=(None,) * 30,
    tie_embeddings=True,
)
# Grattafiori et al. 2024
LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    windows=(None,) * 32,
)
SHAPES = {
    "small": dataclasses.replace(SMALL, vocab_size=4096),  # as many as the bundled tokenizer has
    "smollm-135m": SMOLLM_135M,
    "llama-3-8b": LLAMA_3_8B,
}


def even_heads(model: ModelConfig) -> Calibration:
    """Return a calibration by which a model is as sensitive to each of its heads."""
    shape = model.num_layers, model.num_kv_heads, model.group_size
    return Calibration(sensitivity=Table(np.ones(shape, np.float32)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped(Base):
    """Flags of an experiment that times a model of random weights."""

    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    rounds: int = setting(7, "rounds in which all take turns", least=2, quick=2)

    def model_of(self, positions: int) -> ModelConfig:
        """Return the configuration of the model, with room for so many positions."""
        model = SHAPES[self.shape]
        layers = self.layers or model.num_layers
        return dataclasses.replace(model, num_layers=layers, windows=(None,) * layers, max_positions=positions)
