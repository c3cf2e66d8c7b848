"""The bundled models: the small one writes, and is near the large one."""

import numpy as np

from et_jax import load
from et_jax.models.bundled import bundled_folder
from et_jax.models.checkpoint import read_config
from et_jax.training import corpus, distillation, recipe

# Elizabeth Gaskell, Mary Barton (1848), preface: held out from the training of either
TEXT = (
    "I had always felt a deep sympathy with the care-worn men, who looked as if doomed to struggle through their lives "
    "in strange alternations between work and want; tossed to and fro by circumstances, apparently in even a greater "
    "degree than other men. A little manifestation of this sympathy, and a little attention to the expression of "
    "feelings on the part of some of the work-people with whom I was acquainted, had laid open to me the hearts of one "
    "or two of the more thoughtful among them."
)


def test_the_small_model_writes_and_is_near_the_large_one_on_a_text_that_neither_was_trained_on():
    settings = recipe.small_settings()
    assert read_config(bundled_folder("bundled-small")) == settings.model
    teacher, tokenizer = distillation.read_teacher(bundled_folder(), settings)
    ids = np.array([tokenizer.encode(TEXT).ids], np.int32)
    rows = corpus.Rows(inputs=ids[:, :-1], targets=ids[:, 1:], target_mask=np.ones_like(ids[:, 1:], bool))
    student, _ = distillation.read_teacher(bundled_folder("bundled-small"), settings)
    found = distillation.agreement(student.params, settings, teacher, rows)
    assert found.overlap.mean() > 0.5 and found.divergence.mean() < 1.0
    [completion] = load("bundled-small", max_model_len=64).generate("It was", max_tokens=12, seed=1)
    assert completion.text.strip()
