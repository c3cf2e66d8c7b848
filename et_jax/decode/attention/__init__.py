"""How a step or a chunk attends to the cache.

`readers` defines the attention of every layer: full attention, or the blocks that a selector chooses (`block_sparse`),
the blocks that drafts read (`pruned`), or those within a prefill budget (`budgeted`). `selection` chooses blocks by the
`summaries` of pages, and `blocks` lists them. `reading` calls the kernels, `attended` computes the attention mass of
blocks, and `reads` reports which blocks were read.
"""
