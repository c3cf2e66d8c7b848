"""Compiled programs, which outlive a process.

`compilation` stores them in a `store`, and `executables` stores their call signatures, by a `key`. `preload` loads
them while weights are read, and `few_rows` chooses programs for few sequences.
"""
