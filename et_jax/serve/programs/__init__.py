"""Compiled programs, which outlive a process.

`compilation` stores them in a `store`, and `executables` stores their call signatures, by a `key`. `few_rows`
chooses programs for few sequences.
"""
