"""Rotary embedding of queries and keys, and the store of keys and values into their pages, in one kernel."""

from et_jax.pallas.rotate_store.api import rotate_store as rotate_store
