"""An n-gram model over tokens, the baseline of the bundled model: interpolated modified Kneser-Ney.

Chen & Goodman 1998, section 3: the highest order counts occurrences, every lower one the distinct tokens
before a gram; each order subtracts one of three discounts from a count and passes the remainder to
the next lower order, down to the uniform distribution. An n-gram is one unsigned 64-bit number, its first
token in the highest bits, so that counting is sorting.
"""

import dataclasses

import numpy as np
from jaxtyping import Float64, Integer, UInt64

from et_jax.errors import UsageError

FALLBACK_DISCOUNT = 0.75  # if an order has too few rare grams to estimate its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """One order: its grams, each with its discounted share of its context; its contexts, each with the remainder."""

    grams: UInt64[np.ndarray, " n"]
    shares: Float64[np.ndarray, " n"]
    contexts: UInt64[np.ndarray, " c"]
    remainders: Float64[np.ndarray, " c"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramModel:
    """Orders from unigrams up; `bits` per token."""

    vocab_size: int
    bits: int
    orders: tuple[Order, ...]


def pack(ids: Integer[np.ndarray, " n"], order: int, bits: int, before: int) -> UInt64[np.ndarray, " n"]:
    """Return the gram that ends at every token; `before` replaces the tokens in front of the first."""
    padded = np.concatenate([np.full(order - 1, before), ids]).astype(np.uint64)
    grams = np.zeros(len(ids), np.uint64)
    for offset in range(order):
        grams = (grams << np.uint64(bits)) | padded[offset : offset + len(ids)]
    return grams


def fit(ids: Integer[np.ndarray, " n"], vocab_size: int, order: int, before: int) -> NGramModel:
    """Return the model of a token stream."""
    bits = max(1, (vocab_size - 1).bit_length())
    if order * bits > 64:
        raise UsageError(f"{order} tokens of {bits} bits do not fit into 64 bits; take a lower order.")
    grams, counts = np.unique(pack(ids, order, bits, before), return_counts=True)
    orders = [_order(grams, counts, bits)]
    for length in range(order - 1, 0, -1):
        grams, counts = np.unique(grams & np.uint64((1 << (length * bits)) - 1), return_counts=True)
        orders.append(_order(grams, counts, bits))
    return NGramModel(vocab_size=vocab_size, bits=bits, orders=tuple(reversed(orders)))


def discounts(counts: Integer[np.ndarray, " n"]) -> Float64[np.ndarray, " 4"]:
    """Return the discounts of counts of 0, 1, 2 and 3 or more (Chen & Goodman 1998, equation 26)."""
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == i)) for i in range(1, 5))
    if min(n1, n2, n3, n4) == 0:
        return np.array([0.0] + [FALLBACK_DISCOUNT] * 3)
    y = n1 / (n1 + 2 * n2)
    found = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return np.where((found > 0) & (found <= np.arange(4)), found, np.minimum(FALLBACK_DISCOUNT, np.arange(4)))


def _order(grams: np.ndarray, counts: np.ndarray, bits: int) -> Order:
    taken = discounts(counts)[np.minimum(counts, 3)]
    parents = grams >> np.uint64(bits)
    firsts = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
    totals = np.add.reduceat(counts, firsts).astype(np.float64)
    sizes = np.diff(np.append(firsts, len(grams)))
    return Order(
        grams=grams,
        shares=(counts - taken) / np.repeat(totals, sizes),
        contexts=parents[firsts],
        remainders=np.add.reduceat(taken, firsts) / totals,
    )


def probabilities(model: NGramModel, grams: UInt64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return p(last token | the tokens before it) of every gram of the model's highest order."""
    result = np.full(len(grams), 1.0 / model.vocab_size)
    for length, order in enumerate(model.orders, start=1):
        tails = grams & np.uint64((1 << (length * model.bits)) - 1)
        shares = _look_up(order.grams, order.shares, tails, 0.0)
        result = shares + _look_up(order.contexts, order.remainders, tails >> np.uint64(model.bits), 1.0) * result
    return result


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], missing)
