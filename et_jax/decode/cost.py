"""What a step costs, in bytes moved and in FLOPs, from shapes and from what the step really read.

Bytes are the cost of decoding: at small batches every weight and every listed page is read once per
step, and reading them is what a step waits for.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of each thing a step may read: all weights, one KV head's block, one block's summary."""

    weights: int
    block: int
    summary: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What it takes to run a model.

    `weights` bytes are read in every pass, `num_multiplied` weights meet every token, which reads what it sees of
    `heads` KV heads over all layers, `token` bytes of each, each met by `group_size` queries of `head_dim` channels.
    """

    weights: int
    num_multiplied: int
    heads: int
    token: int
    group_size: int
    head_dim: int

    def flops(self, tokens: int, length: int) -> float:
        """Return the FLOPs of so many tokens of a text of `length`, at most."""
        return tokens * token_flops(self.num_multiplied, length * self.heads, self.group_size, self.head_dim)

    def cached_bytes(self, tokens: int, length: int) -> float:
        """Return the bytes of keys and values that they read, at most."""
        return float(tokens * length * self.heads * self.token)


def nominal_bytes(
    traffic: Traffic, batch: int, blocks_read: Int[Array, " b"], summaries_read: Int[Array, " b"]
) -> Float[Array, " b"]:
    """Return what a step costs each sequence in the eyes of the laws: its blocks, its summaries, a fixed share.

    Blocks and summaries count over layers and KV heads. The share of the weights is that of the `batch`
    sequences that a step may serve, so that what a law decides does not depend on the company.
    """
    blocks = blocks_read.astype(jnp.float32) * float(traffic.block)
    summaries = summaries_read.astype(jnp.float32) * float(traffic.summary)
    return blocks + summaries + traffic.weights / batch


def charged_bytes(traffic: Traffic, num_served: int, blocks_read: int, summaries_read: int) -> float:
    """Return what a step cost one of the `num_served` sequences that it brought a token: the books' view.

    They share the weights among them, so that the charges of a step add up to what it moved.
    """
    return float(blocks_read * traffic.block + summaries_read * traffic.summary) + traffic.weights / num_served


def token_flops(num_weights: int, tokens_read: int, group_size: int, head_dim: int) -> float:
    """Return the FLOPs of one token: two per weight, and four per channel of every key and value read.

    `num_weights` counts the weights that are multiplied (an embedding only where it is the head too);
    `tokens_read` counts cached tokens over layers and KV heads, each met by `group_size` query heads.
    """
    return 2.0 * num_weights + 4.0 * head_dim * group_size * tokens_read


def selection_flops(summaries_read: int, group_size: int, head_dim: int, codes_per_summary: int) -> float:
    """Return the FLOPs, at most, of scoring blocks by their summaries, counted over layers and KV heads.

    Per query head and channel: 8 for the two ends of the box, 2 for the mean key, and 2 for every 8-bit
    key where a block keeps `codes_per_summary` of them.
    """
    return (10.0 + 2.0 * codes_per_summary) * head_dim * group_size * summaries_read
