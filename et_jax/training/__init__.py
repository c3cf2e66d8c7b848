"""Training of the bundled models, and of a small mixture of experts. Nothing that decodes imports this package.

    corpus, mixture -> loop (schedule, loss, balance, distillation) -> export, card or student_card

`recipe` has the settings that made them and `settings` what a run is; `probe` asks the tasks during training, `ngram`
is the yardstick, `compact` the state that is kept beside the code.
"""
