"""Decode attention over a paged KV cache that reads only the listed blocks."""

from et_jax.pallas.paged_attention.api import paged_attention as paged_attention
