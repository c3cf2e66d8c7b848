"""Numbers that callers give: every field and every flag that takes one, found by looking, against every kind of number.

Each is taken, as one that 32 bits hold, or refused in a sentence.
"""

import dataclasses
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from every_law import values

from et_jax import evaluate, generate
from et_jax.cli import command
from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.config import EngineConfig
from et_jax.serve.requests import GenerationRequest, SamplingParams

HOSTILE = [
    *(10**18, -(10**18), 10**400, -(10**400), 10**5000, 2**31, 2**63, 0, -1, True, False),
    *(math.nan, math.inf, -math.inf, 1e308, -1e308, 3.4e38, 3e-39, 1e-400, 5e-324, 0.5, 1j),
    *("5", b"1", None, [1], Decimal(1), Decimal("NaN"), Fraction(1, 2), Fraction(10**400), object()),
    *(np.int64(5), np.uint64(2**64 - 1), np.float32(1.5), np.float64("nan"), np.bool_(True), np.complex64(1)),
    *(np.longdouble(1.5), jnp.float32(1), jnp.int32(3), jnp.float32(jnp.nan), jnp.array([1])),
]
PARAMS = SamplingParams()


pytestmark = pytest.mark.usefixtures("as_users_have_it")


def made(make: Callable[[], Any], kind: type[ValueError], what: str) -> Any:
    """What is made, or None where that is refused in a sentence."""
    try:
        return make()
    except kind as error:
        assert 0 < len(str(error)) < 300 and "\n" not in str(error) and "Exceeds" not in str(error), what
        return None
    except Exception as error:
        raise AssertionError(f"{what} ends in {type(error).__name__}") from error


def shown(value: Any) -> str:
    return f"{type(value).__name__} {value if not isinstance(value, int) or abs(value) < 2**64 else '...'}"


def test_every_field_of_what_is_asked_for():
    asked = {EngineConfig: {}, SamplingParams: {}, GenerationRequest: {"prompt": "a", "params": PARAMS}}
    for kind, field in ((one, f) for one in asked for f in dataclasses.fields(one)):
        for value in HOSTILE:
            what = f"{kind.__name__}.{field.name} = {shown(value)}"
            found = made(lambda k=kind, f=field, v=value: k(**asked[k] | {f.name: v}), UsageError, what)
            number = None if found is None else getattr(found, field.name)
            assert not isinstance(number, float) or abs(number) <= 3.4e38, what


def test_every_number_of_every_law():
    for one in values():
        for field in dataclasses.fields(one):
            counts = field.init and isinstance(getattr(one, field.name), int | float)
            for value in HOSTILE if counts else []:
                what = f"{type(one).__name__}.{field.name} = {shown(value)}"
                found = made(lambda o=one, f=field, v=value: dataclasses.replace(o, **{f.name: v}), ValueError, what)
                number = None if found is None else getattr(found, field.name)
                if type(number) in (int, float):
                    most = 2**31 - 1 if type(number) is int else np.finfo(np.float32).max
                    assert abs(number) <= most or math.isinf(number), what


ENOUGH = {
    "--tau": ["--control", "ead", "--small", "bundled-small"],
    "--prefill-budget": ["--control", "entropyinfer"],
    "--draft-tokens": ["--draft", "lookup"],
    "--draft-share": ["--draft", "self"],
    **{flag: ["--control", "certified"] for flag in ("--target-entropy", "--tolerance", "--min-blocks", "--window")},
}
"""What a flag goes with."""


@pytest.mark.parametrize("of", [generate, evaluate])
def test_every_flag_that_takes_a_number(of, monkeypatch, capfd):
    def stand_in(name: str = "bundled", *, progress: Any = None, **settings: Any) -> None:
        EngineConfig(name=name, **settings)
        raise UsageError("loaded.")

    monkeypatch.setattr(engine, "load", stand_in)
    start = ["-p", "a"] if of is generate else ["--task", "passkey"]
    flags = [one.option_strings[0] for one in of.parser()._actions if one.type in (int, float)]
    assert len(flags) >= 10
    for flag in flags:
        for value in ("1" + "0" * 18, "-1" + "0" * 18, "1" + "0" * 400, "1" * 5000, "nan", "inf", "-inf", "1e308"):
            try:
                code = of.main([*start, *ENOUGH.get(flag, []), f"{flag}={value}"])
            except SystemExit as ended:  # argparse knows that it is no number of the kind
                code = ended.code
            said = capfd.readouterr().err.splitlines()[-1]
            assert code == command.USAGE and "error: " in said and len(said) < 6000, (flag, value[:9], said[:300])
