"""The stored state of sequences' tokens: keys and values in pages.

`kv` is the cache of a model, `pages` maps blocks to pages, `eight_bits` stores keys and values in 8 bits.
`compress` drops entries of a sequence by its last `queries`. `snapshots` saves a state on disk.
"""
