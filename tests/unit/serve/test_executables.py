"""Programs that are called without being traced: the same bits, and anew wherever anything they come from differs."""

import dataclasses
import os
import stat
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from small_model import configuration

from et_jax.control import refresh
from et_jax.control.base import as_value
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode.decoder import Program, decoder
from et_jax.decode.drafting import drafts as drafting
from et_jax.decode.drafting.drafts import Drafting
from et_jax.io import own_sources
from et_jax.scope import own_settings
from et_jax.serve.programs import compilation, executables
from et_jax.serve.programs import key as program_key
from et_jax.serve.programs.executables import CachedProgram
from et_jax.serve.programs.store import ProgramStore
from et_jax.types import static, value

NUMBERS = np.linspace(-2.0, 3.0, 64, dtype=np.float32)


@value
class Pair:
    """A tree with something in its structure."""

    x: jax.Array
    y: jax.Array
    power: int = static(default=3)


class Programs:
    """Starts of one program: each as a process would, and how often it was traced."""

    def __init__(self) -> None:
        self.num_traced = 0

    def start(self, told: str = "a configuration", name: str = "step") -> CachedProgram:
        """Return the program as a process finds it that has called nothing yet."""
        jax.clear_caches()

        def step(pair: Pair, by):
            self.num_traced += 1
            return dataclasses.replace(pair, x=jnp.sin(pair.x) ** pair.power, y=pair.y + by), jnp.sum(pair.x)

        return CachedProgram(Program(jax.jit(step, donate_argnums=0)), name, told)


def given(numbers=NUMBERS, power: int = 3) -> Pair:
    device = jax.devices()[0]
    return Pair(x=jax.device_put(numbers, device), y=jax.device_put(np.int32(4), device), power=power)


def bits(program: CachedProgram, pair: Pair | None = None) -> tuple[bytes, ...]:
    """Call a program, and return every bit of what it gives."""
    found = program(given() if pair is None else pair, np.int32(2))
    return tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found))


@pytest.fixture
def programs(unset, tmp_path, monkeypatch):
    """Starts with a folder of their own, of a package that was not changed, and has `Pair`."""
    monkeypatch.setattr(own_sources, "IMPORTED", time.time() + 1e6)
    monkeypatch.setattr(program_key, "_KNOWN", program_key._KNOWN | {__name__})
    assert compilation.cache_programs(tmp_path / "programs") is None
    yield Programs()
    own_sources.digest.cache_clear()
    program_key._machine.cache_clear()


@pytest.fixture
def calls(programs, tmp_path):
    """The folder of what it takes to call programs."""
    return tmp_path / "programs/calls"


def test_a_program_that_was_kept_gives_the_same_bits_untraced(programs, calls):
    first = programs.start()
    assert first.seconds is None
    expected = bits(first)
    assert programs.num_traced == 1 and first.seconds is not None and first.seconds > 0
    before, again, pair = compilation.made(), programs.start(), given()
    assert bits(again, pair) == expected == bits(again)
    spent = compilation.made() - before
    assert programs.num_traced == 1
    assert spent.programs == 1 and spent.loading > 0 and spent.tracing == spent.compiling == 0
    assert again.seconds == first.seconds  # what it took when it was compiled
    assert pair.x.is_deleted() and again(given(), np.int32(2))[0].power == 3
    assert stat.S_IMODE(calls.stat().st_mode) == 0o700
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in calls.iterdir()] == [0o600]


def test_arguments_of_other_shapes_structures_and_layouts_have_programs_of_their_own(programs):
    cases = {}, {"numbers": NUMBERS[:7]}, {"power": 2}, {"numbers": NUMBERS.astype(np.float16)}
    expected = [bits(programs.start(), given(**case)) for case in cases]
    assert programs.num_traced == 4 and len(set(expected)) == 4
    program = programs.start()
    for _ in range(2):
        assert [bits(program, given(**case)) for case in cases] == expected
    assert programs.num_traced == 4
    rows = given(NUMBERS.reshape(8, 8)[:, :5])
    by_columns = Format(Layout(major_to_minor=(1, 0)), rows.x.sharding)
    columns = dataclasses.replace(given(NUMBERS), x=jax.device_put(rows.x, by_columns))
    found = [programs.start()(pair, np.int32(2))[0] for pair in (rows, columns)]
    assert programs.num_traced == 6
    np.testing.assert_array_equal(found[0].x, found[1].x)


OTHER_CHIP = SimpleNamespace(fingerprint=lambda: 1)  # a processor with other features


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
        lambda patch: patch.setattr(program_key.version, "__version__", "0.0.1"),
        lambda patch: patch.setattr(np, "__version__", "0.0.1"),
        lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to="),
        lambda patch: patch.setattr(program_key.xla_client, "get_topology_for_devices", lambda _: OTHER_CHIP),
    ],
    ids=["jax", "jaxlib", "numpy", "flags", "processor"],
)
def test_what_makes_programs_and_what_runs_them_are_in_the_key(programs, monkeypatch, change):
    bits(programs.start())
    with monkeypatch.context() as patch:
        change(patch)
        program_key._machine.cache_clear()
        for _ in range(2):
            bits(programs.start())
    program_key._machine.cache_clear()
    bits(programs.start())
    assert programs.num_traced == 2


def test_names_configurations_and_settings_are_in_the_key(programs):
    for start in ({}, {"told": "another configuration"}, {"name": "another"}):
        bits(programs.start(**start))
    jax.config.update("jax_memory_fitting_level", "O1")
    bits(programs.start())
    jax.config.update("jax_memory_fitting_level", "O2")
    bits(programs.start())
    assert programs.num_traced == 4


def test_entries_that_are_damaged_or_not_the_user_s_own_are_made_anew(programs, calls, caplog):
    expected = bits(programs.start())
    [entry] = calls.iterdir()
    damages = [
        (lambda: os.truncate(entry, 100), "is damaged"),
        (lambda: entry.chmod(0o666), "is damaged"),
        (lambda: ProgramStore(calls).put(entry.stem, b"whole, and no program"), "cannot be loaded (UnpicklingError"),
    ]
    if os.geteuid() == 0:
        damages.append((lambda: os.chown(entry, 12345, -1), "is damaged"))
    for number, (damage, words) in enumerate(damages, 2):
        damage()
        caplog.clear()
        assert bits(programs.start()) == expected and programs.num_traced == number
        [sentence] = caplog.messages
        assert words in sentence
        assert bits(programs.start()) == expected and programs.num_traced == number


def test_a_folder_that_is_not_the_user_s_own_is_left_alone(programs, calls, caplog, monkeypatch):
    expected = bits(programs.start())
    calls.chmod(0o770)
    entries = {entry: entry.read_bytes() for entry in calls.iterdir()}
    assert bits(programs.start()) == expected and programs.num_traced == 2
    assert "others may write to it" in caplog.messages[-1] and str(calls) in caplog.messages[-1]
    calls.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert bits(programs.start()) == expected and programs.num_traced == 3
        assert "belongs to another user" in caplog.messages[-1]
    assert {entry: entry.read_bytes() for entry in calls.iterdir()} == entries
    for entry in entries:
        entry.unlink()
    calls.rmdir()
    calls.symlink_to(calls.parent)
    assert bits(programs.start()) == expected and programs.num_traced == 4
    assert "it is something else" in caplog.messages[-1]


def test_half_of_what_is_kept_is_made_whole_without_a_word_and_another_program_is_not_run(programs, calls, caplog):
    """Two processes may each compile one program, and the second puts its own in the place of the first's."""
    expected = bits(programs.start())
    [call], [place], store = calls.iterdir(), calls.parent.glob("jit_step-*"), ProgramStore(calls.parent)

    def replaced():
        program = store.get(place.stem)
        assert program is not None
        store.put(place.stem, program + b"\0")

    for number, damage in enumerate((call.unlink, place.unlink, replaced), 2):
        damage()
        assert bits(programs.start()) == expected and programs.num_traced == number
        assert bits(programs.start()) == expected and programs.num_traced == number
    assert not caplog.messages


def test_another_thread_makes_a_program_ahead(programs):
    expected = bits(Programs().start("another"))
    with ThreadPoolExecutor(1) as threads:
        program, pair = programs.start(), given()
        with own_settings(), jax.transfer_guard("allow"):  # as a model has them that serves
            make = program.ahead(pair, np.int32(2))
        data = weakref.ref(pair.x)
        del pair
        assert data() is None  # the memory is free for what runs meanwhile
        threads.submit(make).result()
        before = compilation.made()
        make()  # as one does that has waited for another
        assert programs.num_traced == 1 and compilation.made() == before
        pair = given()
        assert bits(program, pair) == expected and programs.num_traced == 1 and pair.x.is_deleted()
        assert bits(programs.start()) == expected and programs.num_traced == 1


def test_a_configuration_is_told_by_all_but_the_numbers_of_its_laws(programs):
    plain = configuration()
    others = [
        configuration(max_steps=31),
        configuration(keep=frozenset({"codes"})),
        configuration(draft=Drafting(most=7)),
        configuration(cache_dtype=jnp.bfloat16),
        configuration(controller=preset("certified")),
        configuration(controller=Controller(law=refresh.Every(2))),
        configuration(model=dataclasses.replace(plain.model, norm_eps=2e-5)),
    ]
    told = [program_key.config_text(one) for one in (plain, *others)]
    assert None not in told and len(set(told)) == len(told)
    assert program_key.config_text(configuration()) == told[0]
    numbers = [preset("certified", tolerance=0.01), preset("certified", tolerance=0.02)]
    assert len({program_key.config_text(configuration(controller=one)) for one in numbers}) == 1


def own_law(signals, state):
    return state


def test_what_a_caller_wrote_cannot_be_told(programs, monkeypatch):
    monkeypatch.setattr(program_key, "_KNOWN", program_key._KNOWN - {__name__})
    for law in (own_law, lambda signals, state: state):
        config = configuration(controller=Controller(law=as_value(law)))
        assert program_key.config_text(config) is None
        bound = decoder(config)
        assert executables.cached(bound) is bound
    assert program_key.config_text(configuration(draft=Drafting(drafter=lambda text, newest, most: text))) is None
    drafted = configuration(draft=Drafting())
    assert program_key.config_text(drafted) is not None
    with monkeypatch.context() as patch:  # the decoder has the package's own, and another stands under its name
        patch.setattr(drafting, "lookup", own_law)
        assert program_key.config_text(drafted) is None
    assert isinstance(executables.cached(decoder(configuration())).step, CachedProgram)
    own_sources.digest.cache_clear()
    monkeypatch.setattr(own_sources, "IMPORTED", 0.0)  # before every source
    assert program_key.config_text(configuration()) is None
