"""Scores of blocks from the summaries of their pages, for block selection."""

from et_jax.pallas.block_scores.api import block_scores as block_scores
from et_jax.pallas.block_scores.api import code_scores as code_scores
