r"""The machine, pure: a state in, a state out.

    decoder -> prefill, score, step, slots -> drafting, verify -> extend -> attention -> cache
                                                       \-> sampling

`decoder` binds the functions to a `config`. `prefill` reads prompts, `score` gives the log-probabilities of given text,
`step` decodes one token of every sequence, `slots` starts and ends sequences. `extend` runs a model over a `chunk` of
tokens; a `plant` is one model with its cache. `attention` says how the cache is read, by which kernels `backends`;
`cache` holds keys and values; `mixing` says how experts are mixed, and `packed` joins the notes of a layer. `verify`
goes from logits to committed tokens, with what `drafting` guessed ahead; `sampling` draws them.

`config` is fixed for the life of a decoder, `state` is what it keeps between two steps and `output` what a step
reports. `fresh` is what a sequence starts from, `request` what starts one, `rows` which slots a step advances, `faults`
what can go wrong with one, and `once` guards what a step may leave out. `compat` is the table of what goes with what.
`work` is what a step does for its sequences, and `cost` what that moves. `sharded` has the chips of a mesh do all of it
together.
"""
