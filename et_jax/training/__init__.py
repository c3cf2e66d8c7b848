"""Training of the bundled models. The decoder does not import this package.

    corpus, mixture -> loop (schedule, loss, distillation) -> export, card or student_card

`recipe` has the settings of the trained models and `settings` those of a run; `probe` evaluates the tasks during
training, `ngram` is the baseline, `compact` stores a training state in few bytes. `rollouts` gives completions to a
trainer of one's own.
"""
