"""Decode steps on one chip, as `scripts/experiments/chip.py` measures them.

    processes (a process of its own) -> decoding, torch_step, modelled

`cases` says what is measured, `modelled` what it would take by bytes and launches alone. Only these processes compute
on the chip.
"""
