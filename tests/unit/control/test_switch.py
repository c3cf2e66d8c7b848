"""Who speaks, along entropies of every kind, against the loop of the paper written out; how hysteresis departs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from et_jax.control.switch import MODEL, SMALL, AsPrinted, Hysteresis

ENTROPIES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=60)


def speakers(switch, entropies: list[float]) -> list[int]:
    """Who says each token; an entropy is told to whoever is asked, and again to a model that is handed the word."""
    step = jax.jit(lambda state, entropy: (switch.before(state, entropy), switch.after(state, entropy)))
    state, said = switch.started(), []
    for entropy in entropies:
        before, _ = step(state, jnp.float32(entropy))
        if int(before.speaker) != int(state.speaker):
            state = before
        said.append(int(state.speaker))
        state = step(state, jnp.float32(entropy))[1]
    return said


@given(ENTROPIES)
def test_the_printed_switch_is_the_papers_loop(entropies):
    said, window, count, speaker = [], [], 0, SMALL
    for entropy in entropies:
        said.append(speaker)
        window.append(entropy)
        count += 1
        mean = np.mean(window[-5:])
        if count >= 10 and (speaker == SMALL) == (mean > 1.25):
            speaker, count = 1 - speaker, 0
    assert speakers(AsPrinted(1.25), entropies) == said


@given(ENTROPIES)
def test_with_hysteresis_every_mean_is_of_one_speaker(entropies):
    switch, said, own, count, speaker = Hysteresis(1.25, low=0.5, window=4, least=2), [], [], 2, SMALL
    for entropy in entropies:
        if speaker == SMALL and count >= 2 and np.mean([*own, entropy][-4:]) > 1.25:
            speaker, own, count = MODEL, [], 0
        said.append(speaker)
        own, count = [*own, entropy], count + 1
        if speaker == MODEL and count >= 2 and np.mean(own[-4:]) <= 0.625:
            speaker, own, count = SMALL, [], 0
    assert speakers(switch, entropies) == said


@pytest.mark.parametrize("switch", [AsPrinted, Hysteresis])
def test_a_speaker_keeps_the_word_for_as_long_as_it_is_given(switch):
    said = speakers(switch(1.0, least=4), ([0.0] * 8 + [5.0] * 8) * 5)
    changes = np.flatnonzero(np.diff(said))
    assert len(changes) > 2 and (np.diff(changes) >= 4).all()


def test_at_either_end_of_the_bound_one_speaks():
    entropies = [0.0, 3.0] * 20
    assert set(speakers(AsPrinted(math.inf), entropies)) == set(speakers(Hysteresis(math.inf), entropies)) == {SMALL}
    assert set(speakers(Hysteresis(-1.0), entropies)) == {MODEL}
    assert speakers(AsPrinted(-1.0), entropies) == [SMALL] * 10 + [MODEL] * 30
