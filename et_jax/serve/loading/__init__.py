"""From a model's name to what serves it.

`opened` reads a model and checks it, `sizing` gives its decoder, `calibrating` measures it on text, `min_context` has
the lengths from which presets pay. `verdict` says by config.json alone whether a model runs, and `chips` over how many
chips, `description` what was loaded.
"""
