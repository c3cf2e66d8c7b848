"""Compiled programs, which outlive a process.

`compilation` keeps them in a `store`, and `executables` keeps what it takes to call them, by a `key`. `few_rows`
chooses programs for few sequences.
"""
