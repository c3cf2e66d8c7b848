"""Settings recorded for a device stand before the rule; what a kernel refuses is refused in a sentence."""

import json

import jax
import numpy as np
import pytest
from cases import ATTENTION
from ladder import TPU

from et_jax.errors import UsageError
from et_jax.pallas import tuned
from et_jax.pallas.paged_attention import pieces, xla
from et_jax.pallas.paged_prefill.tpu import Config
from et_jax.pallas.ring import RingConfig

SHAPE = ATTENTION.shapes["group_4"]
KEY = "paged_attention/xla page_size=16 head_dim=64 queries=4 dtype=bfloat16"


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Write a table for this device."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)

    def write(entries):
        tuned.path(jax.devices()[0].device_kind).write_text(json.dumps(entries))

    return write


def settings_used(monkeypatch):
    """What the kernel takes for the shape, by the number of pages its gathers bring at once."""
    groups = []
    tokens = pieces.tokens
    monkeypatch.setattr(
        pieces, "tokens", lambda pages, rows, *some: groups.append(rows.shape[1]) or tokens(pages, rows, *some)
    )
    jax.eval_shape(lambda arrays: xla.paged_attention(**arrays), ATTENTION.example(SHAPE))
    return set(groups)


def test_an_entry_is_honoured_on_its_device_and_an_unknown_key_falls_to_the_rule(recorded, monkeypatch):
    by_rule = settings_used(monkeypatch)
    assert by_rule == {xla.heuristic(16, 64, np.dtype("bfloat16"), "cpu").group}
    recorded({KEY: {"group": 3, "joint": False}})
    assert settings_used(monkeypatch) == {3}
    rule, facts = xla.Config(group=8, joint=True), {"page_size": 16, "head_dim": 64, "queries": 4, "dtype": "bfloat16"}
    with jax.sharding.use_abstract_mesh(TPU):
        assert tuned.settings(rule, "paged_attention/xla", **facts) == rule
    recorded({KEY.replace("queries=4", "queries=5"): {"group": 3, "joint": False}})
    assert settings_used(monkeypatch) == by_rule


def test_settings_within_settings_are_read(recorded):
    recorded({"paged_prefill/tpu page_size=16": {"tile": 32, "ring": {"group": 8, "depth": 4}}})
    found = tuned.settings(Config(tile=16, ring=RingConfig(group=4, depth=3)), "paged_prefill/tpu", page_size=16)
    assert found == Config(tile=32, ring=RingConfig(group=8, depth=4))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"group": 0, "joint": False}, "group: got 0, wanted at least 1"),
        ({"group": 4, "joint": False, "depth": 2}, "depth"),
        ({"group": 4}, "joint"),
    ],
)
def test_settings_the_kernel_refuses_are_refused_in_a_sentence(recorded, entry, reason):
    recorded({KEY: entry})
    with pytest.raises(UsageError) as caught:
        xla.paged_attention(**ATTENTION.example(SHAPE))
    message = str(caught.value)
    assert reason in message and KEY in message and "scripts/tune_kernels.py" in message


@pytest.mark.parametrize(("group", "depth", "reason"), [(3, 2, "group: got 3"), (256, 2, "group"), (4, 1, "depth")])
def test_a_ring_that_cannot_turn_is_refused(group, depth, reason):
    with pytest.raises(ValueError, match=reason):
        RingConfig(group=group, depth=depth)


def test_every_table_in_the_package_is_read():
    """Each entry names a kernel and builds its settings."""
    for table in tuned.FOLDER.glob("*.json"):
        for name, entry in json.loads(table.read_text()).items():
            assert name.split()[0] == "paged_attention/xla"
            xla.Config(**entry)
