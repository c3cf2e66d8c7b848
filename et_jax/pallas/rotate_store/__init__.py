"""Rotary positions of queries and keys, and keys and values stored in their pages, by one kernel."""

from et_jax.pallas.rotate_store.api import rotate_store as rotate_store
