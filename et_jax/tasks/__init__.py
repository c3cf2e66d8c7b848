"""Questions whose answers stand far back in a text, and the loss of a text by position.

`base` says what a task is, `generators` has them by name, made of `words`; `files` reads those that others have
published. `scored` has what given texts are worth to a model. `asking` puts them to a model, `answers` shows what it
made of them. `position_loss` asks nothing, and `calibration` fits the temperature of a model's entropies to text.
"""
