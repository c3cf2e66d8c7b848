"""Kernels: one folder each, with api, reference, xla, gpu and tpu.

paged_attention, paged_prefill, block_scores
per_head                       a function of one row and KV head, for all of them
add_norm, add_residual         reference and gpu alone: elsewhere XLA fuses them
rotate_store                   likewise
backend, tuned                 which one serves a device, and settings measured on it
checks, workspace              what all share: arguments checked, bytes set aside
folding                        rows of one slot whose queries stand in one group
apart                          rows of unlike lengths, walked one after the other
gather, ring, hopper           what those of one backend share: XLA, TPU, GPU
"""
