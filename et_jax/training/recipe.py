"""The settings of the models trained here: shapes, training on novels, for long contexts, and distillation."""

import dataclasses

from et_jax.errors import UsageError
from et_jax.models.config import ModelConfig
from et_jax.training.corpus import END_ID, WINDOW
from et_jax.training.mixture import Mixture
from et_jax.training.schedule import Curriculum, Schedule
from et_jax.training.settings import Settings

VOCAB_SIZE = 4096
_GROWN, _STAGE = 1200, 200  # the step from which rows are longer than WINDOW, and the steps between doublings


def bundled_config() -> ModelConfig:
    """Return the shape of the bundled model: 3.8 M weights, 7.6 MB in bfloat16.

    Four wide layers rather than six narrow ones: on a CPU they train a fifth faster at the same size. The
    rotary base of 10,000 turns the slowest channel by a quarter radian over 2048 positions: enough for
    the trained lengths.
    """
    layers = 4
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=WINDOW,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        windows=(None,) * layers,
        tie_embeddings=True,
        bos_token_id=END_ID,
        eos_token_ids=(END_ID,),
    )


def bundled_settings(seed: int = 0) -> Settings:
    """Return the training settings of the bundled model."""
    return Settings(model=bundled_config(), schedule=Schedule(), seed=seed)


def long_settings(seed: int = 0, longest: int = WINDOW) -> Settings:
    """Return the settings of the training for long contexts, which continues from a model of novels only.

    `longest` is the tokens of the last rows: more than 2048, by doubling, is for a GPU; further stages then
    follow, in windows of that length.

    Half of the tokens are tasks. The rotary base grows from 10,000 to 100,000: recall over a length needs
    channels that hardly turn in it, and of 32 pairs 10 rather than 5 turn by less than a radian in 2048
    positions; it also suits 8192 (Men et al. 2024 find 84,000 to be the least for these).
    """
    doublings = (longest // WINDOW).bit_length() - 1
    if longest != WINDOW << max(doublings, 0):
        raise UsageError(
            f"The longest rows are {longest} tokens; choose {WINDOW}, {2 * WINDOW}, {4 * WINDOW} and so on."
        )
    grown = tuple((_GROWN + i * _STAGE, WINDOW << (i + 1)) for i in range(doublings))
    return Settings(
        model=dataclasses.replace(bundled_config(), rope_theta=100_000.0, max_positions=longest),
        schedule=Curriculum(stages=Curriculum().stages + grown),
        window=longest,
        mixture=Mixture(),
        seed=seed,
        matrix_rate=0.015,
        other_rate=2e-3,
        evaluate_every=100,
        save_every=50,
        evaluated_length=512,
    )


def small_config() -> ModelConfig:
    """Return the shape of the small model of the bundled one's family: 0.6 M weights, 1.2 MB in bfloat16.

    The embedding of the shared vocabulary takes two thirds of them. Two layers are the fewest that can recall
    (one head marks the token before each one, one of the next layer looks for it: Olsson et al. 2022).
    """
    layers = 2
    return dataclasses.replace(
        bundled_config(),
        hidden_size=96,
        intermediate_size=224,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=100_000.0,
        windows=(None,) * layers,
    )


def small_settings(seed: int = 0) -> Settings:
    """Return the settings of the distillation of the bundled model into the small one.

    A quarter of the tokens are tasks. All positions count, those of answers five times.
    """
    return Settings(
        model=small_config(),
        schedule=Schedule(warmup=30, short_length=256, long_share=0.12),
        mixture=Mixture(task_shares=((0, 0.25),), other_weight=1.0),
        distilled=True,
        seed=seed,
        windows_per_step=2,
        evaluate_every=250,
        save_every=50,
        evaluated_length=512,
    )


def settings(recipe: str, seed: int, longest: int = WINDOW) -> Settings:
    """Return the settings of a recipe by name: "short", "long" or "small"."""
    if recipe == "long":
        return long_settings(seed, longest)
    if longest != WINDOW:
        raise UsageError(f"The recipe {recipe} ends with rows of {WINDOW} tokens; --longest belongs to --recipe long.")
    return small_settings(seed) if recipe == "small" else bundled_settings(seed)
