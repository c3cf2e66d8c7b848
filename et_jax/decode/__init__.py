"""The machine, pure: a state in, a state out.

    decoder -> prefill, step, slots -> draft, attention, verify -> selection, sample, sampling -> cache, pages, noise

`state` has what is held between two steps, `rows` which slots a step advances, `faults` what can go wrong with one.
`snapshots` keeps a state on disk, `cost` says what a step moves.
"""
