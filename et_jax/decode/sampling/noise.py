"""The noise of sampling: a function of only the request's key, the position and the token id.

It is the same in any batch, for a token verified with its predecessors, and for a second model that drafts. It is a
stateless counter-based hash: threefry maps key and position to two words, which key a hash of the token id. For a given
key and position the hash is a permutation of 32-bit words, so all tokens have different words.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_BELOW_ONE = 1 - 2.0**-24  # the greatest float32 below 1
_TOGETHER = 64  # tokens: a multiple of any processor's vector length


def race_noise(key: UInt32[Array, "b 2"], position: Int[Array, " b"], vocab_size: int) -> Float[Array, "b v"]:
    """Return E, exponentially distributed with rate 1, of every token at the position of each row.

    The token with the least E / p is sampled with probability p: a race of exponential clocks, the same as the greatest
    log p - log E, since -log E is a Gumbel variate. Two models that race with the same noise agree with probability at
    least (1 - TV) / (1 + TV), where TV is the total variation between their distributions and the best coupling
    reaches 1 - TV (Daliri, Musco and Suresh 2024).
    """
    whole = -(-vocab_size // _TOGETHER) * _TOGETHER
    noise = exponential(random_bits(key, position, whole))
    # without the barrier the loop has a remainder of a vector, which a processor may round differently
    return noise if whole == vocab_size else jax.lax.optimization_barrier(noise)[:, :vocab_size]


def random_bits(key: UInt32[Array, "b 2"], position: Int[Array, " b"], vocab_size: int) -> UInt32[Array, "b v"]:
    """Return 32 random bits of every token at the position of each row.

    Two rounds of Wellons's hash of 32-bit words, each keyed by a word of threefry (Salmon et al. 2011), in an
    Even-Mansour construction. `benchmarks/results/sampling.json` compares its cost with those of threefry and Philox.
    """
    words = jax.vmap(_folded)(key, position)
    token = jnp.arange(vocab_size, dtype=jnp.uint32)
    return _mixed(_mixed(token ^ words[:, :1]) ^ words[:, 1:])


def _folded(key: UInt32[Array, " 2"], position: Int[Array, ""]) -> UInt32[Array, " 2"]:
    """Return the key with the position folded in."""
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position))


def _mixed(x: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Permute words so that every bit depends on every other (C. Wellons, hash-prospector, 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def exponential(bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the exponential variates with rate 1 at the quantiles (bits + 1/2) / 2^32, from 2^-33 to 16.6.

    The least of many numbers wins a race, so the quantiles near 0 require all bits: they are 2^-32 apart, and none is
    0. Near 1 float32 has 24 bits; quantiles that would round to 1 are clipped below it.
    """
    quantile = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(quantile, _BELOW_ONE))
