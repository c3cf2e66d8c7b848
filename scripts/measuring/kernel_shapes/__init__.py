"""Named shapes of kernels, for tests, benchmarks and tuning alike: one list an op, over what all share in `base`.

paged_attention, paged_prefill, block_scores
"""
