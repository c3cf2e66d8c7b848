"""Which entries a compression keeps, written out in NumPy, head by head: what `control.compression` must agree with."""

import math
from fractions import Fraction

import numpy as np


def masses(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Mean attention of a group's last queries "w g d", oldest first, to the keys "m d" of one KV head.

    The last query is that of the last key, and each sees the keys up to its own.
    """
    total, (w, g, d) = np.zeros(len(keys)), queries.shape
    for i in range(w):
        sees = len(keys) - (w - 1 - i)
        for query in queries[i].astype(np.float64):
            scores = keys[:sees].astype(np.float64) @ query / math.sqrt(d)
            weight = np.exp(scores - scores.max())
            total[:sees] += weight / weight.sum()
    return total / (w * g)


def ranked(keys: np.ndarray, queries: np.ndarray, window: int, pooling: int) -> np.ndarray:
    """The scores of the entries before the window."""
    before = masses(keys, queries)[: len(keys) - window]
    return np.array(
        [before[max(0, i - pooling // 2) : i + pooling // 2 + 1].sum() / pooling for i in range(len(before))]
    )


def split(scores: list[np.ndarray], budget: int, window: int, page: int, floor: float, most: int) -> list[int]:
    """The blocks each head keeps by AdaKV, from the scores of the entries before the window."""
    beyond = budget - window
    every = sorted(((-score, head) for head, each in enumerate(scores) for score in each))[: len(scores) * beyond]
    least = math.ceil((window + floor * beyond) / page)
    rest = len(scores) * (budget // page - least)
    exact = [Fraction(rest * sum(head == one for _, one in every), len(every)) for head in range(len(scores))]
    blocks = [least + math.floor(each) for each in exact]
    by_remainder = sorted(range(len(scores)), key=lambda head: math.floor(exact[head]) - exact[head])
    for head in by_remainder[: rest - sum(math.floor(each) for each in exact)]:
        blocks[head] += 1
    return [
        min(each, most * budget // page, (len(score) + window) // page)
        for each, score in zip(blocks, scores, strict=True)
    ]


def best(score: np.ndarray, number: int, window: int) -> list[int]:
    """The entries of the highest scores, as many as make `number` with the window's, in order."""
    chosen = np.argsort(-score, kind="stable")[: number - window].tolist()
    return sorted([*chosen, *range(len(score), len(score) + window)])


def kept(
    name: str, keys: list[np.ndarray], queries: np.ndarray, *, budget: int, window: int, pooling: int, page: int
) -> list[list[int]]:
    """The entries that each head of a layer keeps by a policy that ranks by attention, AdaKV or another."""
    group = queries.shape[1] // len(keys)
    grouped = [queries[:, head * group : (head + 1) * group] for head in range(len(keys))]
    scores = [ranked(key, query, window, pooling) for key, query in zip(keys, grouped, strict=True)]
    blocks = [min(budget, len(key)) // page for key in keys]
    if name == "adakv":
        blocks = split(scores, budget, window, page, 0.2, 2)
    return [best(score, number * page, window) for score, number in zip(scores, blocks, strict=True)]
