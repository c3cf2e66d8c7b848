"""Training of the bundled model. Nothing that decodes imports this package.

    corpus, mixture -> loop (schedule, loss) -> export, card

`recipe` has the settings that made it and `settings` what a run is; `probe` asks the tasks during training, `ngram` is
the yardstick, `compact` the state that is kept beside the code.
"""
