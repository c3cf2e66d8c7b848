"""The machine, pure: a state in, a state out.

    decoder -> prefill, step, slots, compress -> drafter, turns, verify -> extend -> readers, budgeted
        -> block_sparse, pruned, reading, sample, sampling, truncation, queries -> attended -> selection -> blocks
        -> cache, summaries, eight_bits, pages, noise

`extend` runs a model over a `chunk` of tokens, a `plant` is one model with its cache; `readers`, `block_sparse` and
`budgeted` say how the cache is read, `backends` by which kernels, `reads` what was read; `mixing` says how experts are
mixed. `truncation` and `steering` say which tokens may be drawn. `packed` joins the notes of a layer. `score` gives the
log-probabilities of given text. `selection` chooses `blocks` by the `summaries` of pages, and `attended` gives the
masses found there. `step` is one step, `draft` how drafts are laid out in it, `drafter` a second model that writes
them, or the model itself by a `pruned` reader, `turns` two models that take turns, and `verify` goes from logits to
committed tokens. `config` is what is fixed for the life of a decoder, `state` what is held between two steps and
`output` what a step reports; `fresh` is what a sequence starts from, `request` what starts one, `rows` which slots a
step advances, `faults` what can go wrong with one, and `once` guards what a step may leave out. `compat` is the table
of what goes with what. `compress` makes the cache of a sequence smaller amid its decoding, by its last `queries`.
`snapshots` keeps a state on disk; `work` is what a step does for its sequences, and `cost` what that moves. `sharded`
has the chips of a mesh do all of it together.
"""
