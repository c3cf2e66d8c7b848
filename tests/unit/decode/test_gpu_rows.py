"""On a GPU tokens are multiplied by 64 at a time: what is worked out beside them is nobody's."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from mixtures import CONFIG
from small_model import MODEL, configuration, prompt, run, start, texts, weights

from et_jax.control.draft import FixedLength
from et_jax.decode import extend
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting, lookup

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_texts_are_those_of_as_many_rows_as_there_are(monkeypatch):
    """Of a mixture of experts, whose router sees none of the rows beside; drafted and not."""
    experts = dataclasses.replace(CONFIG, layers=(True,))
    model = dataclasses.replace(MODEL, num_layers=1, windows=(None,), experts=experts)
    drafting = Drafting(most=4, length=FixedLength(), drafter=lookup)
    params, config, rows = weights(model=model), configuration(model=model, draft=drafting), []
    forward = extend.forward

    def watched(weights, model, tokens, *more):
        if tokens.shape[1] == 1:
            rows.append(len(tokens))
        return forward(weights, model, tokens, *more)

    monkeypatch.setattr(extend, "forward", watched)
    found = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(extend, "platform", lambda name=platform: name)
        d = decoder(config)
        state = start(d, params, d.empty(), 0, prompt(0, 9) * 2, temperature=0.0)
        state = start(d, params, state, 2, prompt(1, 14), seed=1)
        found.append(run(d, params, state, 12)[1])
        assert set(rows) == {64} if platform == "gpu" else max(rows) == 15
        rows.clear()
    expected, told = found
    assert texts(told) == texts(expected) and sum(len(text) for text in texts(told).values()) > 10
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, told, expected)  # what experts each token went to, too
