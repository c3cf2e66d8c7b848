"""Knobs: which numbers they may be, bounds included, and the sentence for any other."""

import math

import pytest

from et_jax.errors import UsageError
from et_jax.io.knobs import Knob

SHARE = Knob(help="a share", unit="share", wanted="from 0 to 1", kind=float, least=0.0, most=1.0)
TOKENS = Knob(help="tokens", unit="tokens", wanted="1 or above", kind=int, least=1)
BOUND = Knob(help="a bound", unit="nats", wanted="a number", kind=float, infinite=True)


@pytest.mark.parametrize(
    ("one", "given", "sentence"),
    [
        (SHARE, 1.5, "it is 1.5; it must be from 0 to 1."),
        (SHARE, math.inf, "it is inf; it must be a finite number."),
        (TOKENS, 0, "it is 0; it must be 1 or above."),
        (TOKENS, 2.0, "it is 2.0; it must be a whole number."),
        (BOUND, math.nan, "it is nan; it must be a finite number."),
    ],
)
def test_anything_else_is_refused_in_one_sentence(one, given, sentence):
    with pytest.raises(UsageError) as refused:
        one.checked("it", given)
    assert str(refused.value) == sentence
