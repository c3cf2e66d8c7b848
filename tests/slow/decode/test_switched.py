"""Two models that take turns: texts of an independent program, the small one alone without a bound, none left out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from exact import surprisal_moments
from small_model import MODEL, OTHER, PROMPTS, configuration, dense, produced, same_bits, weights

from et_jax.control.controller import Controller
from et_jax.control.switch import AsPrinted, Hysteresis
from et_jax.decode import decoder as decoding

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIMIT = 20
SWITCHES = {"printed": AsPrinted(4.17, window=3, least=2), "guarded": Hysteresis(4.2, low=0.98, window=3, least=2)}


def pair() -> tuple:
    return weights(), weights(model=OTHER)


@functools.cache
def made(switch, **changes):
    """The decoder of a switch's structure; its numbers come with the requests."""
    controller = Controller(switch=switch)
    return decoding.decoder(configuration(controller=controller, others=(OTHER,), num_pages=49, **changes))


def begun(d, switch=None):
    control = None if switch is None else dataclasses.replace(d.config.controller, switch=switch)
    asked = {"limit": LIMIT, "control": control}
    return small_model.begun(d, pair(), lambda slot: asked | {"temperature": 0.7 * (slot == 1), "seed": slot})


def spoken(d, state):
    """Tokens, entropies and, of two models, who spoke, of every slot; and the output of all steps."""
    outputs = []
    while jnp.any(state.active):
        state, output, ran = d.decode(pair(), state, 32)
        outputs.append(jax.tree.map(lambda x, ran=ran: np.asarray(x)[: int(ran)], output))
    output = jax.tree.map(lambda *x: np.concatenate(x), *outputs)
    rows = produced(output, len(output.produced)).items()
    return {slot: (row.token.tolist(), row.signals.entropy, row.by_small.tolist()) for slot, row in rows}, output


def both(switch):
    d = made(SWITCHES["printed"] if isinstance(switch, AsPrinted) else SWITCHES["guarded"])
    return spoken(d, begun(d, switch))


def by_hand(switch, tokens: list[int]) -> tuple[list[int], list[bool]]:
    """The greedy text and who says what, by dense forward passes over the whole text and the paper's own loop."""
    text, window, since, small = list(tokens), [], 0, True
    if isinstance(switch, Hysteresis):
        since = switch.least
    said, by_small = [], []
    while len(said) < LIMIT:
        model, params = (OTHER, pair()[1]) if small else (MODEL, pair()[0])
        logits = dense(params, model, text)[0][-1]
        seen = [*window, surprisal_moments(logits)[0]][-switch.window :]
        if isinstance(switch, Hysteresis) and small and since >= switch.least and np.mean(seen) > switch.tau:
            small, window, since = False, [], 0
            continue
        said.append(int(np.argmax(logits)))
        text.append(said[-1])
        by_small.append(small)
        window, since = seen, since + 1
        if isinstance(switch, AsPrinted):
            wanted = np.mean(window) <= switch.tau
            if since >= switch.least and wanted != small:
                small, since = wanted, 0
        elif not small and since >= switch.least and np.mean(window) <= switch.low * switch.tau:
            small, window, since = True, [], 0
    return said, by_small


@pytest.mark.parametrize("name", SWITCHES)
def test_two_models_write_what_an_independent_program_does(name):
    rows, output = both(SWITCHES[name])
    for slot in (0, 2):
        said, by_small = by_hand(SWITCHES[name], PROMPTS[slot])
        assert rows[slot][0] == said and rows[slot][2] == by_small
        assert 0 < sum(by_small) < LIMIT  # both speak
    # tokens read: each model reads every text up to the last token it speaks after, once
    read = np.asarray([work.tokens.sum() for work in output.work])
    assert (read <= len(PROMPTS) * LIMIT + sum(map(len, PROMPTS.values()))).all() and (read > 0).all()


def test_texts_are_the_same_where_prompts_are_read_late():
    expected, _ = both(SWITCHES["guarded"])
    late = made(SWITCHES["guarded"], lazy=True)
    state = begun(late)
    model, small = (plant.num_cached for plant in state.plants)
    assert not model.any() and small.tolist() == [len(PROMPTS[slot]) - 1 for slot in PROMPTS]
    rows, _ = spoken(late, state)
    assert same_bits(rows, expected)


def test_whoever_catches_up_says_which_of_the_others_words_were_its_own_too():
    switch = SWITCHES["printed"]
    d = made(switch, audit=True)
    rows, output = spoken(d, begun(d))
    expected, _ = both(switch)
    for slot in (0, 2):
        said, _, by_small = rows[slot]
        assert said == expected[slot][0] and by_small == expected[slot][2]
        # all words of a run were caught up with, but those of the last one
        last = max(i for i in range(1, LIMIT) if by_small[i] != by_small[i - 1])
        agreed = 0
        for i in range(last):
            model, params = (MODEL, pair()[0]) if by_small[i] else (OTHER, pair()[1])
            agreed += int(np.argmax(dense(params, model, PROMPTS[slot] + said[:i])[0][-1])) == said[i]
        told = [each[..., slot].sum() for each in (output.audit.audited, output.audit.agreed)]
        assert told == [last, agreed]
