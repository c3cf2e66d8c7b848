"""The machine, pure: a state in, a state out.

    decoder -> prefill, step, slots -> attention, selection, sample, sampling -> cache, pages

`state` has what is held between two steps, `snapshots` keeps it on disk, `cost` says what a step moves.
"""
