"""What cannot be is refused where it is made, in one sentence."""

import pytest
from drawn_blocks import blocks

from et_jax.control import select
from et_jax.control.budget import ConstantBudget, MassBudget
from et_jax.control.compression import Compression
from et_jax.control.contribution import token_nll
from et_jax.control.expected_error import ExpectedError
from et_jax.control.view import mass

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def one_number(view):
    return view.tolerance


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ConstantBudget(tokens=0), "tokens is 0; it must be at least 1"),
        (lambda: MassBudget(left=1.0), "left is 1.0; it must be from 0 to below 1"),
        (lambda: Compression(budget=32), "budget: got 32, wanted "),
        (lambda: Compression(budget=42).layout(4, (None,)), "budget: got 42, wanted "),
        (lambda: select.ActiveSet(look_every=0), "look_every is 0; it must be at least 1, or None"),
        (lambda: select.PerHead(select.TopMass(), one_number)(blocks(0).view), "The rule .*one_number.* returns"),
        (lambda: select.coded_bounds(blocks(0).view), "no key codes"),
        (lambda: token_nll(blocks(0).view, mass(blocks(0).view)), "no surprisals"),
        (lambda: ExpectedError()(blocks(0).view), "no key codes, or no sensitivity"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        make()
    assert "\n" not in str(refused.value)
