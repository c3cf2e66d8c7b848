"""Kernels: one folder each, with api, reference, xla, gpu and tpu implementations.

paged_attention, paged_prefill, block_scores
per_head                       runs a function of one row and KV head for all of them
add_norm, add_residual         reference and gpu only: elsewhere XLA fuses them
rotate_store                   likewise
store_rows                     on a TPU: rows of summaries at their pages
backend, tuned                 the backend of a device, and settings measured on it
checks, workspace              checks of arguments, sizes of temporaries
folding                        rows of one slot folded into one query group
apart                          rows of different lengths, processed in tiles or one by one
gather, ring, hopper           shared code of one backend: XLA, TPU, GPU
"""
