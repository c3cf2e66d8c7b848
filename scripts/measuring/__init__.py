"""What experiments share; nothing that decodes imports this package.

    experiment -> runner (arms, resuming, provenance) -> tables

`experiment` says what an experiment is and checks its settings, `runner` measures its arms and writes JSON, `tables`
shows what they gave. `paired` compares arms row by row and finds them at equal budgets, `timing` has them take turns.
`text` cuts rows of text, `teacher_forced` runs a model over them by the decoder's own step, and `prompts` segment by
segment. `results` names the machine. `shapes` are models to measure on, `selectors` what several experiments choose
blocks by, `kernel_shapes` cases of kernels, and `states` decoders filled by hand.
"""
