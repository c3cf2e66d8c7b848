"""The machine, pure: a state in, a state out.

    decoder -> prefill, switched, slots, compress -> step -> small -> draft, attention, verify
        -> selection, reading, sample, sampling, queries -> cache, pages, noise

`state` has what is held between two steps, `request` what starts a sequence, `rows` which slots a step advances,
`faults` what can go wrong with one, and `once` guards what a step may leave out. `compat` is the table of what goes
with what. `small` is a second model that
drafts, `switched` a step of two that take turns. `budgeted` is attention of prompts of which less is read. `compress`
makes the cache of a sequence smaller amid its decoding, by its last `queries`. `snapshots` keeps a state on disk,
`cost` says what a step moves.
"""
