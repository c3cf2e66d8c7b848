"""Laws in sequence, the packed mask of blocks, and the laws a decoder runs unasked."""

import copy
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.base import (
    Chain,
    ControlState,
    Law,
    Signals,
    chain,
    noted,
    one_like,
    pack_blocks,
    started,
    unpack_blocks,
    updated,
)
from et_jax.control.bounds import Interval
from et_jax.control.clock import FallClock, RecordClock
from et_jax.control.guards import Saturation
from et_jax.control.priority import EntropyDrift
from et_jax.control.select import Dense, SinksWindow
from et_jax.control.selector import MaskSelector, Selection, Selector, selection
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.temperature import Fixed, Thermostat
from et_jax.control.view import BlockView
from et_jax.types import Number, replace, value

INTEGERS = {"blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "pages_held", "wait"}


def signals(**given) -> Signals:
    names = [field.name for field in dataclasses.fields(Signals)]
    return Signals(**{n: jnp.asarray(given.get(n, 0), jnp.int32 if n in INTEGERS else jnp.float32) for n in names})


def control(law: Law | None = None, **given) -> ControlState:
    """The state of a new sequence, all zeros but for what is given, as `law` starts it."""
    numbers = [
        f.name
        for f in dataclasses.fields(ControlState)
        if f.name not in ("block_mask", "notes", "prompt", "block_mass")
    ]
    fields = {n: jnp.asarray(given.get(n, 0), jnp.int32 if n in INTEGERS else jnp.float32) for n in numbers}
    state = ControlState(**fields, block_mask=jnp.zeros((1, 1, 1), jnp.uint32), notes={})
    return state if law is None else law.init(state)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_mask_packs_bit_by_bit_and_comes_back(mask):
    num_words = math.ceil(len(mask) / 32)
    expected = [sum(bit << i for i, bit in enumerate(mask[32 * w : 32 * w + 32])) for w in range(num_words)]
    words = pack_blocks(jnp.asarray(mask))
    assert words.dtype == jnp.uint32
    assert words.tolist() == expected
    assert unpack_blocks(words).tolist() == mask + [False] * (32 * num_words - len(mask))


def test_packing_keeps_the_leading_axes():
    mask = np.random.default_rng(0).random((3, 2, 5, 70)) < 0.5
    words = pack_blocks(jnp.asarray(mask))
    assert words.shape == (3, 2, 5, 3)
    np.testing.assert_array_equal(unpack_blocks(words)[..., :70], mask)


class WriteDown(Law):
    """Adds its name to a list whenever it starts or runs."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def init(self, state: ControlState) -> ControlState:
        self.ran.append(f"start {self.name}")
        return state

    def __call__(self, _: Signals, state: ControlState) -> ControlState:
        self.ran.append(self.name)
        return state


def test_a_chain_starts_and_runs_its_laws_in_order_and_a_chain_is_a_law():
    ran: list[str] = []
    a, b, c, d = (WriteDown(name, ran) for name in "abcd")
    law = Chain((a, Chain((b, c)), d))
    state = control(law)
    assert ran == ["start a", "start b", "start c", "start d"]
    law(signals(), state)
    assert ran[4:] == ["a", "b", "c", "d"]
    assert chain(EmaEntropy(), chain(Fixed(), FallClock())) == chain(chain(EmaEntropy(), Fixed()), FallClock())


def test_each_law_of_a_chain_sees_what_those_before_it_decided():
    def add(_: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=state.temperature + 3.0)

    def double(_: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=state.temperature * 2.0)

    start = control(temperature=1.0)
    assert float(chain(add, double)(signals(), start).temperature) == 8
    assert float(chain(double, add)(signals(), start).temperature) == 5


def test_a_plain_function_has_nothing_to_start_and_an_empty_chain_changes_nothing():
    start = control(temperature=0.7)
    assert chain(lambda signals, state: replace(state, tolerance=signals.entropy)).init(start) is start
    assert chain().init(start) is start and chain()(signals(), start) is start
    assert Fixed()(signals(entropy=3.0), start) is start


@settings(max_examples=30)
@given(st.lists(st.floats(0, 12, width=32), min_size=1, max_size=30))
def test_the_papers_clock_is_half_the_total_variation_plus_the_net_fall(entropies):
    """The sum of falls is (sum |dH| + H_0 - H_n) / 2, whatever the series."""
    law = FallClock()
    state = control(law)
    times = []
    for entropy in entropies:
        state = law(signals(entropy=entropy), state)
        times.append(float(state.entropic_time))
    h = np.asarray(entropies, np.float64)
    assert times[0] == 0
    assert np.all(np.diff(times) >= 0)
    np.testing.assert_allclose(times[-1], (np.abs(np.diff(h)).sum() + h[0] - h[-1]) / 2, atol=1e-4)


@settings(max_examples=30)
@given(
    temperature=st.floats(0.125, 2, width=32),
    entropy=st.floats(0, 11, width=32),
    target=st.floats(0, 5),
    gain=st.floats(0.001, 0.5),
)
def test_the_thermostat_is_its_formula_and_cools_above_the_target(temperature, entropy, target, gain):
    law = Thermostat(target, gain=gain, low=0.1, high=2.0)
    state = law(signals(tempered_entropy=entropy, entropy=99.0), control(temperature=temperature))
    expected = min(max(temperature * math.exp(-gain * (entropy - target)), 0.1), 2.0)
    assert float(state.temperature) == pytest.approx(expected, rel=1e-5)
    assert float(state.temperature) <= temperature if entropy > target else float(state.temperature) >= temperature


def test_a_law_changes_only_the_fields_it_is_named_for():
    for law, own in ((FallClock(), {"entropic_time", "notes"}), (Thermostat(1.0), {"temperature"})):
        start = control(law, temperature=1.0)
        end = law(signals(entropy=2.0, tempered_entropy=3.0), start)
        kept = [f.name for f in dataclasses.fields(ControlState) if f.name not in own]
        assert all(getattr(end, name) is getattr(start, name) for name in kept)


def view(length: int, num_blocks: int, page_size: int) -> BlockView:
    start = jnp.arange(num_blocks, dtype=jnp.int32) * page_size
    box = jnp.zeros((num_blocks, 4))
    return BlockView(
        query=jnp.ones((2, 4)),
        score=Interval(low=jnp.zeros((2, num_blocks)), high=jnp.zeros((2, num_blocks))),
        middle=jnp.zeros((2, num_blocks)),
        key_min=box,
        key_max=box,
        key_mean=box,
        value_mean=box,
        value_radius=jnp.zeros(num_blocks),
        start=start,
        num_tokens=jnp.clip(length - start, 0, page_size),
        length=jnp.int32(length),
        tolerance=jnp.float32(0),
        head_tolerance=jnp.zeros(2),
        tail_log_mass=jnp.zeros(2),
    )


@settings(max_examples=30)
@given(
    length=st.integers(1, 64), sinks=st.integers(0, 20), window=st.integers(1, 80), page_size=st.sampled_from([1, 4, 8])
)
def test_sinks_and_window_open_the_blocks_that_hold_such_a_token(length, sinks, window, page_size):
    num_blocks = 64 // page_size
    opened = SinksWindow(sinks, window)(view(length, num_blocks, page_size)).tolist()
    held = range(-(-length // page_size))
    wanted = {at // page_size for at in range(length) if at < sinks or at >= length - window}
    assert {block for block in held if opened[block]} == wanted


def test_dense_opens_every_block_and_says_so():
    assert Dense()(view(5, 8, 4)).all() and Dense().reads_all and not SinksWindow().reads_all


def test_laws_run_under_vmap_row_by_row():
    law = chain(FallClock(), Thermostat(1.0))
    rows = [signals(entropy=h, tempered_entropy=h) for h in (0.5, 1.0, 4.0)]
    start = control(law, temperature=1.0)
    one_by_one = [law(row, start) for row in rows]

    def stack(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    together = jax.vmap(law)(stack(rows), stack([start] * 3))
    for row in range(3):
        alone = jax.tree.leaves(one_by_one[row])
        assert all(np.array_equal(a, b[row]) for a, b in zip(alone, jax.tree.leaves(together), strict=True))


def forged(state: ControlState, **fields) -> ControlState:
    """The state with fields that the shape checks of a test run would not let `replace` set."""
    other = copy.copy(state)
    vars(other).update(fields)
    return other


def seen(signals: Signals, state: ControlState) -> ControlState:
    """Set the temperature to a list of numbers."""
    return forged(state, temperature=jnp.zeros(3))


@pytest.mark.parametrize(
    ("law", "sentence"),
    [
        (seen, "The law seen sets temperature to float32[3]; it must be float32[]."),
        (
            lambda signals, state: forged(state, wait=signals.entropy),
            "sets wait to float32[]; it must be int32[].",
        ),
        (lambda signals, state: forged(state, tolerance="much"), "sets tolerance to str; it must be float32[]."),
        (lambda signals, state: signals.entropy, "must return the ControlState it is given, with fields changed"),
        (lambda signals, state: noted(state, "mine", signals.entropy), "leaves notes of {['mine'] float32[]} where {}"),
    ],
)
def test_what_a_law_may_not_return_is_told_in_a_sentence_that_names_it(law, sentence):
    with pytest.raises(ValueError) as told:
        chain(FallClock(), law)
        updated(chain(law), signals(), control())
    assert sentence in str(told.value) and "\n" not in str(told.value)


def test_a_python_number_stands_for_an_array_of_the_fields_dtype():
    after = updated(chain(lambda signals, state: forged(state, temperature=1, wait=2)), signals(), control())
    assert (after.temperature.dtype, after.wait.dtype) == (jnp.float32, jnp.int32)
    assert (float(after.temperature), int(after.wait)) == (1.0, 2)


@pytest.mark.parametrize(
    "law",
    [
        chain(FallClock(), RecordClock()),
        Saturation(Saturation(Thermostat(1.0), "temperature", 0.1, 2.0), "temperature", 0.5, 1.0),
        chain(EntropyDrift(), EntropyDrift(0.5)),
    ],
)
def test_a_second_claim_to_a_note_is_refused(law):
    with pytest.raises(ValueError, match="which another law of the chain keeps already; leave one of them out"):
        started(law, control())


def test_a_selector_that_returns_no_mask_is_named():
    shown = view(5, 8, 4)
    answers = {
        "int": 1,
        "float": 1.0,
        "bool": True,
        "None": None,
        r"bool\[2\]": shown.start[:2] > 0,
        r"int32\[8\]": shown.start,
        r"bool\[\]": np.bool_(True),
        "{}": (),
        "str": "all",
    }
    for told, answer in answers.items():

        def own(_: BlockView, answer=answer):
            return answer

        with pytest.raises(ValueError, match=rf"own returns {told}; it must be bool\[8\]\.$"):
            MaskSelector(own)(shown)


def test_a_selector_that_chooses_no_selection_is_named():
    shown = view(5, 8, 4)
    blocks, heads = shown.start >= 0, jnp.zeros((*shown.query.shape[:-1], *shown.start.shape))
    whole = Selection(opened=blocks, estimate=heads, upper=None)

    class Own(Selector):
        def __init__(self, answer: Any) -> None:
            self.choose = lambda view: answer

    answers = {
        "chooses None; its choose must return a Selection": None,
        r"chooses bool\[8\]; its choose must return a Selection": blocks,
        r"opens bool\[2\]; it must be bool\[8\]": Selection(opened=blocks[:2], estimate=heads[:, :2], upper=None),
        r"estimates float32\[1, 8\]; it must be float32": Selection(opened=blocks, estimate=heads[:1], upper=None),
    }
    for told, answer in answers.items():
        with pytest.raises(ValueError, match=rf"^The selector Own {told}"):
            selection(Own(answer), shown)
    assert selection(Own(whole), shown).opened is blocks


def test_a_fraction_is_no_whole_number_and_a_number_no_mask():
    for wanted, number in ((jnp.zeros(2, jnp.int32), 1.5), (jnp.zeros(2, bool), 1), (jnp.zeros(2), True)):
        with pytest.raises(ValueError, match=r"^It gives (float|int|bool); it must be [a-z0-9]+\[2\]\.$"):
            one_like(wanted, number, "It gives")
    assert one_like(jnp.zeros(2), 1, "").tolist() == one_like(jnp.zeros(2), np.float64(1), "").tolist() == [1.0, 1.0]


@value
class Warm(Law):
    """A law of one's own with a number."""

    slope: Number = 0.1

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        return replace(state, temperature=0.5 + self.slope * signals.entropy)


def test_a_law_of_ones_own_with_numbers_is_a_value():
    assert Warm(0.1) == Warm() and Warm(0.2) != Warm() and hash(Warm()) == hash(Warm(0.1))
    assert repr(chain(Warm(0.25))) == "Chain(laws=(Warm(slope=0.25),))"
    assert jax.tree.structure(Warm(0.3)) == jax.tree.structure(Warm(0.1))
    slopes = Warm(jnp.asarray([0.0, 1.0, 2.0]))
    rows = jax.tree.map(lambda x: jnp.full(3, x), signals(entropy=2.0))
    got = jax.vmap(lambda law, s: law(s, control()))(slopes, rows)
    np.testing.assert_allclose(got.temperature, [0.5, 2.5, 4.5])


@pytest.mark.parametrize("slope", [None, "much", float("nan"), True])
def test_a_number_that_is_none_is_refused_where_a_law_is_made(slope):
    with pytest.raises((ValueError, TypeError)):
        Warm(slope)


def test_signals_are_shown_with_their_units_one_column_a_sequence():
    def rows(shown: Signals) -> list[list[str]]:
        drawn = shown._repr_html_()
        assert drawn is not None
        return [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", drawn)]

    [header, *one] = rows(signals(entropy=1.25, blocks_read=3))
    assert header == ["signal", "value", "unit"]
    assert [row[0] for row in one] == [field.name for field in dataclasses.fields(Signals)]
    assert ["entropy", "1.25", "nats"] in one and ["blocks_read", "3", "blocks"] in one
    names = [field.name for field in dataclasses.fields(Signals)]
    several = Signals(**{n: jnp.arange(12, dtype=jnp.int32 if n in INTEGERS else jnp.float32) for n in names})
    [header, first, *_] = rows(several)
    assert header == ["signal", *"01234567", "unit"] and first == ["entropy", *"01234567", "nats"]
    assert "The first 8 of 12 sequences." in str(several._repr_html_())


def test_signals_amid_tracing_are_left_to_repr():
    seen = []
    jax.jit(lambda given: seen.append((given._repr_html_(), repr(given))))(signals())
    jax.eval_shape(lambda given: seen.append((given._repr_html_(), repr(given))), signals())
    assert [html for html, _ in seen] == [None, None] and all("Signals(entropy=" in text for _, text in seen)
