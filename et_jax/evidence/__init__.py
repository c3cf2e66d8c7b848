"""Measuring: what the scripts share.

    arguments -> shapes -> states -> a script's own loop -> results (JSON) -> tables, figures

`arguments` refuses what a script cannot count or write. `shapes` are models to measure on, `kernel_shapes` cases of
kernels, and `states` decoders filled by hand, `random_folder` a model of any shape on disk, `held_out` is the text and
`block_views` a model's own keys, `sensitivity` how much depends on each head; `plain_attention` refuses models of which
these cannot be told. `forced` runs a model over given text while it reads less, `prompt_arms` while it reads less of
the text as a prompt, `compression_arms` once its cache forgot a part of it, and `paired` compares ways of reading less
at equal budgets, row by row. `misplaced` shows laws the entropies of other sequences or moments. `coupling` is how
often two models agree that sample with one noise, `walks` what drafts along a text would take, `own_drafts` what a
model would draft for itself, `expert_arms` a mixture that reads with as many experts as a rule says. `results` writes
what was found with the machine it was found on, and `tables`, of reading, `prompt_tables`, `draft_tables`,
`expert_tables`, `serving_tables` and `figures` show it. `calibration` fits a temperature to it, `roofline` says what no
kernel can beat. Nothing that decodes imports this package.
"""
