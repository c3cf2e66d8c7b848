"""What a model that drafts for itself would gain on a chip, from published peaks."""

import pytest

from et_jax.evidence.roofline import CHIPS, Shape, self_drafted


def test_eight_long_texts_on_a_v5e_gain_what_bytes_allow():
    """Bytes by hand: 16.06 GB of weights, and 131,072 tokens of 8 x 2 x 128 channels in 32 layers, of 8 sequences.

    A step reads 16.06 + 137.4 GB, a drafted token 16.06 + 11.0 GB; seven of them, 0.9 of which hold, bring 5.70 tokens.
    """
    [v5e] = [chip for chip in CHIPS if chip.name == "TPU v5e"]
    found = self_drafted(v5e, Shape(rows=8, length=131_072))
    assert found.plain == pytest.approx(1e3 * 153.5e9 / 819e9, rel=1e-3)
    assert found.drafts == 7
    assert found.speed == pytest.approx(5.6953 * 153.5 / (7 * 27.06 + 153.5), rel=1e-3)


def test_a_short_text_is_not_drafted_for():
    assert all(self_drafted(chip, Shape(rows=1, length=2048)).drafts == 0 for chip in CHIPS)
