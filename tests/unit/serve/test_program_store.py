"""Compiled programs on disk: whatever became of an entry, the program runs, and is kept whole or not at all."""

import os
import resource
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.opened import _cache_programs
from et_jax.serve.programs import store as program_store
from et_jax.serve.programs.compilation import cache_programs, default_folder

FOLDER = "jax_compilation_cache_dir"


def run() -> None:
    """Two programs, compiled or read, and what they must give."""
    jax.clear_caches()
    x = np.arange(5.0, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x + 1)(x), 2 * x + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: (x[::-1], -x))(x)[0], x[::-1])


def test_what_is_damaged_is_removed_and_kept_anew_with_one_sentence(unset, tmp_path, caplog):
    folder = tmp_path / "programs"
    assert cache_programs(folder) is None
    run()
    one, other, *_ = entries = sorted(folder.iterdir())
    whole = {entry.name: entry.read_bytes() for entry in entries}

    def replaced_by_a_folder(entry):
        entry.unlink()
        (entry / "inside").mkdir(parents=True)

    def replaced_by_a_link(entry):
        entry.unlink()
        entry.symlink_to(tmp_path)

    damages = (
        lambda entry: os.truncate(entry, 100),
        lambda entry: os.truncate(entry, 0),
        lambda entry: entry.write_bytes(whole[entry.name][:-9] + b"\0" + whole[entry.name][-8:]),
        lambda entry: entry.write_bytes(whole[(other if entry == one else one).name]),
        replaced_by_a_folder,
        replaced_by_a_link,
    )
    for damage in damages:
        for entry in entries:
            damage(entry)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
        assert sorted(folder.iterdir()) == entries and tmp_path.is_dir()
        kept = {entry.name: entry.stat().st_mtime_ns for entry in entries}
        run()  # reads them all: nothing is written again
        assert {entry.name: entry.stat().st_mtime_ns for entry in entries} == kept
        store = program_store.ProgramStore(folder)
        assert all(store.get(entry.name.removesuffix(".program")) for entry in entries)
    [line] = caplog.messages
    assert line == f"A compiled program in {folder} is damaged; such programs are compiled and stored anew."


def test_a_full_disk_keeps_nothing_of_a_program_and_says_so_once(tmp_path, caplog):
    store, (soft, hard) = program_store.ProgramStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.put("before", b"whole")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        store.put("one", b"x" * 2000)
        store.put("two", b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ["before.program"]
    assert (store.get("before"), store.get("one")) == (b"whole", None)
    [line] = caplog.messages
    assert line.startswith(f"Compiled programs cannot be stored in {tmp_path} (File too large)")
    store.put("one", b"x" * 2000)
    assert store.get("one") == b"x" * 2000


def test_what_was_used_last_the_longest_ago_makes_room_and_what_was_left_half_written_goes(tmp_path):
    store = program_store.ProgramStore(tmp_path, most_bytes=3 * (1000 + 32))
    for name, hours in (("left", 25), ("under way", 23)):
        half = tmp_path / f".{name}.new"
        half.write_bytes(b"half")
        os.utime(half, (time.time(), time.time() - 3600 * hours))
    for key in "abc":
        store.put(key, key.encode() * 1000)
        os.utime(tmp_path / f"{key}.program", ns=(1, 1))
    with store.asked() as keys:
        assert store.get("a") is not None
        with ThreadPoolExecutor(1) as threads:
            threads.submit(store.get, "of another thread").result()
        store.get("f")
    store.put("d", b"d" * 1000)
    store.put("e", b"e" * 1000)
    assert sorted(entry.stem for entry in tmp_path.iterdir()) == [".under way", "a", "d", "e"] and keys == ["a", "f"]


def test_a_folder_that_the_program_around_chose_is_jax_s_own(unset, tmp_path):
    jax.config.update(FOLDER, str(tmp_path / "theirs"))
    assert cache_programs(tmp_path / "ours") is None
    run()
    assert not (tmp_path / "ours").exists()
    assert {entry.suffix for entry in (tmp_path / "theirs").iterdir()} == {""}


def test_the_default_folder_is_the_user_s_cache_or_none(unset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = (
        ("/c", "/h", "/c/et_jax/programs"),
        (None, "/h", "/h/.cache/et_jax/programs"),
        ("here", "/h", "/h/.cache/et_jax/programs"),
        (None, "", "HOME is ''"),
    )
    told = []
    for cache, home, expected in cases:
        for name, value in (("XDG_CACHE_HOME", cache), ("HOME", home)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        if expected.startswith("/"):
            assert str(default_folder()) == expected
            continue
        _cache_programs(EngineConfig().compilation_cache, told.append)
        assert told[-1].startswith("compiled programs are not cached: ~/.cache") and expected in told[-1]
        with pytest.raises(UsageError, match=f"~/mine begins with a home, and {expected}"):
            _cache_programs("~/mine", told.append)
        assert getattr(jax.config, FOLDER) is None and not list(tmp_path.iterdir())
