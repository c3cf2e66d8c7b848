"""Causal attention of a chunk of new tokens over a paged KV cache."""

from et_jax.pallas.paged_prefill.api import paged_prefill as paged_prefill
