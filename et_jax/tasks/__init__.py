"""Questions whose answers are far back in a text, and the loss of a text by position.

`base` defines a task, `generators` has them by name, made of `words`; `files` reads published
ones. `scored` scores given texts with a model. `asking` runs a model on them, `answers` presents its
answers. `position_loss` needs no questions, and `calibration` fits the temperature of a model's entropies to text.
"""
