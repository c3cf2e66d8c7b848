"""Whole decode steps on one chip, as `scripts/bench_chip.py` measures them.

    bench_chip -> processes, record, report
    worker (a process of its own) -> decoding, generating, torch_step

`cases` says what is measured, `modelled` what it would take by bytes and launches alone. Only a worker touches the
chip.
"""
