"""EntropyInfer's prefill in numpy, float64, a whole prompt at a time: what the laws must agree with.

Written from the paper (arXiv 2606.09508) and its released code: observation matrix, entropies, rigid heads, budgets,
and the blocks read. Arrays lead with the KV head; queries are "k g t d", keys "k t d".
"""

import ml_dtypes
import numpy as np


def observation(q, k, segment, block):
    """The score of every block for every segment, "k s n", unscaled; a last part of a block is no block."""
    num_segments, num_blocks = -(-q.shape[2] // segment), k.shape[1] // block
    out = np.zeros((k.shape[0], num_segments, num_blocks))
    for head in range(k.shape[0]):
        for s in range(num_segments):
            queries = q[head, :, s * segment : (s + 1) * segment].astype(np.float64)
            high, low = queries.max(axis=1), queries.min(axis=1)
            for j in range(num_blocks):
                keys = k[head, j * block : (j + 1) * block].astype(np.float64)
                tops, bottoms = keys.max(axis=0), keys.min(axis=0)
                with_tops = (high @ tops + low @ tops) / 2
                with_bottoms = (high @ bottoms + low @ bottoms) / 2
                out[head, s, j] = np.maximum(with_tops, with_bottoms).mean()
    return out


def shares(scores, segment, block):
    """Softmax over the blocks before each segment, "k s n"; 0 in the first."""
    out = np.zeros_like(scores)
    for s in range(1, scores.shape[1]):
        seen = scores[:, s, : s * segment // block]
        weights = np.exp(seen - seen.max(axis=-1, keepdims=True))
        out[:, s, : seen.shape[1]] = weights / weights.sum(axis=-1, keepdims=True)
    return out


def entropies(scores, segment, block, *, printed, scale):
    """Entropy of every head and segment, "k s", of unscaled scores; that of the first segment means nothing."""
    if printed:
        p = shares(scores, segment, block).astype(ml_dtypes.bfloat16).astype(np.float64)
        return -(p * np.log(p + 1e-9)).sum(axis=-1)
    p = shares(scores * scale, segment, block)
    count = np.maximum(np.arange(scores.shape[1]) * segment // block, 2)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1) / np.log(count)


def budgets(entropy, tokens, *, gain, threshold, floor, cap):
    """Tokens for every head and segment, "k s", by the recursion alone."""
    out = np.full(entropy.shape, float(tokens))
    for head in range(entropy.shape[0]):
        for s in range(1, entropy.shape[1]):
            growth = threshold
            if s > 1:
                before = entropy[head, s - 1]
                growth = np.clip((entropy[head, s] - before) / (before + 1e-9), 0.0, 1.0 + threshold)
            moved = out[head, s - 1] + gain * tokens * (growth - threshold)
            out[head, s] = np.clip(moved, floor * tokens, cap * tokens)
    return out


def rigid(entropy, below, *, online):
    """Whether a head counts as rigid at every segment, "k s": looking at all segments first, or at those so far."""
    low = entropy < below
    low[:, 0] = True
    if online:
        return np.logical_and.accumulate(low, axis=1)
    return np.broadcast_to(low.all(axis=1, keepdims=True), low.shape)


def best_blocks(scores, counts, segment, block):
    """The `counts` best blocks before each segment, "k s n"."""
    out = np.zeros(scores.shape, bool)
    for head in range(scores.shape[0]):
        for s in range(1, scores.shape[1]):
            seen = scores[head, s, : s * segment // block]
            out[head, s, np.argsort(-seen, kind="stable")[: int(counts[head, s])]] = True
    return out
