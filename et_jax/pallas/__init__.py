"""Kernels: one folder each, with api, reference, xla, gpu and tpu."""
