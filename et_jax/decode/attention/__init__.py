"""How a step or a chunk attends to the cache.

`readers` says how every layer is read: all of it, or the blocks that a selector chooses (`block_sparse`), what drafts
read (`pruned`), or what a budget leaves of a prompt (`budgeted`). `selection` chooses blocks by what `summaries` keep
of pages, and `blocks` lists them. `reading` calls the kernels, `attended` gives the attention mass found in blocks, and
`reads` reports what was read.
"""
