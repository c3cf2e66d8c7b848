r"""Decoding as pure functions: a state in, a state out.

    decoder -> prefill, score, step, slots -> drafting, verify -> extend -> attention -> cache
                                                       \-> sampling

`decoder` binds the functions to a `config`. `prefill` reads prompts, `score` returns the log-probabilities of given
text, `step` decodes one token of every sequence, `slots` starts and ends sequences. `extend` runs a model over a
`chunk` of tokens; a `plant` is one model with its cache. `attention` reads the cache by the kernels of `backends`;
`cache` stores keys and values; `mixing` runs the experts, and `packed` joins the records of a layer. `verify`
goes from logits to committed tokens, including those that `drafting` guessed; `sampling` draws them.

`config` is fixed for the life of a decoder, `state` is carried between two steps and `output` is what a step
reports. `fresh` is the initial state of a sequence, `request` starts one, `rows` are the slots that a step advances,
`faults` are the errors of one sequence, and `once` runs optional parts of a program. `compat` is the table of settings
that exclude each other. `work` counts what a step does for its sequences, and `cost` the bytes it moves. `sharded`
runs all of it over the chips of a mesh.
"""
