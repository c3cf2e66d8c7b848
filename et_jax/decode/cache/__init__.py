"""What sequences keep of their tokens: keys and values in pages.

`kv` is the cache of a model, `pages` says which page holds which block, `eight_bits` stores keys and values in 8 bits.
`compress` drops entries of a sequence by its last `queries`. `snapshots` keeps a state on disk.
"""
