"""What experiments share; nothing that decodes imports this package.

    experiment -> runner (arms, resuming) -> records (JSON, provenance) -> tables, figures

`experiment` says what an experiment is and checks its settings, `runner` measures its arms, `records` keeps what they
gave, and `tables` shows it. `paired` compares arms row by row, `timing` times them in turns. `text` cuts rows of text,
`teacher_forced` runs a model over them by the decoder's own step, and `prompts` segment by segment. `shapes` are models
to measure on, `kernel_shapes` cases of kernels, `states` decoders filled by hand, and `random_folder` is a model of any
shape on disk.
"""
