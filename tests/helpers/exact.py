"""The softmax and its moments in float64: what programs in float32 are held to."""

import numpy as np


def log_softmax(z, temperature=1.0):
    """Return log-probabilities; a token of logit -inf has -inf."""
    z = np.asarray(z, np.float64) / temperature
    return z - np.logaddexp.reduce(z, axis=-1, keepdims=True)


def surprisal_moments(z, temperature=1.0):
    """Return the mean and the variance of -log p: the entropy and the varentropy, in nats."""
    log_p = log_softmax(z, temperature)
    p = np.exp(log_p)
    surprisal = np.where(p > 0, -log_p, 0.0)
    mean = (p * surprisal).sum(-1)
    return mean, (p * (surprisal - mean[..., None]) ** 2).sum(-1)
