"""What each layer and KV head read, told per token: it adds up under every way of reading less."""

import dataclasses

import pytest
from reopened import SIZES

import et_jax
from et_jax import SamplingParams, preset

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIST = "The guests were these: Mr. Brown, Mrs. Brown, Miss Ada Brown, Mr. Grey. "
PROMPTS = [LIST * 2 + "The guests were", "It was late in"]
ASKED = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
SMALL_PAGES = SIZES | {"page_size": 4, "max_model_len": 96, "num_pages": 120}


def opened(**settings):
    return et_jax.load(**(SMALL_PAGES | settings), tell_reads=True)


def heads_of(model) -> list[int]:
    """The KV heads of every layer."""
    return [model.config.num_kv_heads] * model.config.num_layers


def assert_adds_up(model, completions) -> None:
    """Every row by its layers and heads, none of which reads more than it has of all that is held."""
    for row in (row for one in completions for row in one.trace):
        assert row.reads is not None and [len(layer) for layer in row.reads] == heads_of(model)
        assert sum(map(sum, row.reads)) == row.blocks_read
        held = row.blocks_held // sum(heads_of(model))
        assert all(type(head) is int and 1 <= head <= held for layer in row.reads for head in layer)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "control": preset("certified", min_blocks=1, window=4, tolerance=0.5),  # short texts are read in part too
            "draft": "lookup",
            "draft_tokens": 4,
            "draft_length": "fixed",
        },
        {"cache_budget": 36, "cache_policy": "adakv"},
    ],
    ids=["drafts under a preset", "a budget"],
)
def test_reads_add_up_however_tokens_are_served(settings):
    model = opened(**settings)
    done = model.generate(PROMPTS, dataclasses.replace(ASKED, max_tokens=30))
    assert_adds_up(model, done)
    rows = [row for one in done for row in one.trace]
    uneven = any(len({head for layer in row.reads or () for head in layer}) > 1 for row in rows)
    assert uneven or "control" not in settings
    assert "draft" not in settings or any(row.accepted for row in rows)
    assert "cache_budget" not in settings or any(one.tokens_left_out for one in done)


def test_the_tokens_of_a_small_model_that_takes_turns_have_none():
    model = opened(small="bundled-small", control=preset("ead_guarded", tau=5.0))
    [done] = model.generate(PROMPTS[1:], dataclasses.replace(ASKED, max_tokens=24))
    by_small, by_model = ([row for row in done.trace if row.by_small is small] for small in (True, False))
    assert by_small and all(row.reads is None for row in by_small)
    assert by_model and all(sum(map(sum, row.reads or ())) == row.blocks_read for row in by_model)
