"""On a GPU that is here: a text has the same bits alone, in company, and with drafts; without one nothing is run."""

import pytest
from reopened import requested

import et_jax
from et_jax.io.texts import read_text
from et_jax.pallas.backend import platform
from scripts.measuring.results import REPOSITORY

pytestmark = pytest.mark.skipif(platform() != "gpu", reason="no GPU here")


def written(slots: int, alone: bool = False, **drafts):
    """The bits of six texts, greedy and sampled, after prompts of 500 to 1,500 letters, and the tokens accepted."""
    model, text = et_jax.load(dtype="bfloat16", max_num_seqs=slots, **drafts), read_text(REPOSITORY / "README.md", "It")
    asked = [
        requested(text[1500 * i :][: 1500 - 200 * i], max_tokens=60, temperature=0.7 * (i % 2), seed=i)
        for i in range(6)
    ]
    done = [model.generate([one])[0] for one in asked] if alone else model.generate(asked)
    bits = [[(row.token, row.entropy, row.varentropy, row.surprisal) for row in one.trace] for one in done]
    return bits, sum(row.accepted for one in done for row in one.trace)


@pytest.fixture(scope="module")
def expected():
    return written(2, alone=True)[0]


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("drafts", [{}, {"draft": "self", "draft_tokens": 4}, {"draft": "lookup", "draft_tokens": 8}])
def test_company_and_drafts_change_no_bit(expected, drafts, slots):
    bits, accepted = written(slots, **(drafts and drafts | {"draft_length": "fixed"}))
    assert bits == expected and (accepted > 50) == bool(drafts)
