"""Programs compiled for chips that are absent: which chips, which models, what of notebooks, slices, which programs.

Nothing here imports JAX before the first program is built, so that the compilers can be told first that no chip is
there.
"""
