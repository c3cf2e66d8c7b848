"""What the operations and the settings of the softmax refuse, each in one sentence that names the argument."""

from typing import Any

import jax.numpy as jnp
import pytest
from cases import ATTENTION, BLOCK, CODE, PREFILL
from jaxtyping import TypeCheckError
from ladder import taken

from et_jax.pallas.checks import code_rows
from et_jax.softmax import Softmax

RIGHT: dict[Any, dict[str, tuple[int, ...]]] = {
    ATTENTION: {
        "q": (2, 6, 64),
        "pages": (2, 5, 16, 128),
        "page_table": (2, 4),
        "blocks": (2, 2, 4),
        "counts": (2, 2),
        "lengths": (2,),
    },
    PREFILL: {"q": (2, 8, 6, 64), "pages": (2, 5, 16, 128), "page_table": (2, 4), "starts": (2,)},
    BLOCK: {"q": (2, 6, 64), "key_box": (2, 5, 128), "mean": (2, 5, 128), "page_table": (2, 4), "lengths": (2,)},
    CODE: {"q": (2, 6, 64), "key_box": (2, 5, 128), "key_codes": (2, 5, 8, 128), "page_table": (2, 4), "lengths": (2,)},
}
SETTINGS: dict[Any, dict[str, Any]] = {key: {"softmax": Softmax(scale=1.0)} for key in (ATTENTION, PREFILL)}
SETTINGS |= {key: {"scale": 1.0, "page_size": 16} for key in (BLOCK, CODE)}
FLOATS = {"q", "pages", "key_box", "mean", "kv_scales"}


def called(operation, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, Any], settings: dict[str, Any]):
    plain = dict.fromkeys(FLOATS, jnp.float32) | {"key_codes": jnp.int8} | dtypes
    arrays = {name: jnp.zeros(shape, plain.get(name, jnp.int32)) for name, shape in (RIGHT[operation] | shapes).items()}
    return operation.function(**taken(operation.function, arrays), **SETTINGS[operation] | settings)


SHAPES = [
    (ATTENTION, {"q": (2, 7, 64)}, "q"),
    (ATTENTION, {"q": (2, 6, 65)}, "pages"),
    (ATTENTION, {"pages": (2, 5, 16, 192)}, "pages"),
    (ATTENTION, {"blocks": (2, 2, 0)}, "blocks"),
    (PREFILL, {"blocks": (2, 2, 4), "counts": (2, 3)}, "counts"),
    (BLOCK, {"q": (2, 7, 64)}, "q"),
    (BLOCK, {"q": (2, 6, 65)}, "key_box"),
    (CODE, {"key_codes": (2, 5, 8, 127)}, "key_codes"),
]


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(("operation", "change", "argument"), SHAPES)
def test_a_wrong_shape_is_named(operation, change, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: got .*wanted"):
        called(operation, change, {}, {})


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("operation", "shapes", "dtypes", "settings", "message"),
    [
        (ATTENTION, {}, {"q": jnp.float16}, {}, "q: got float16, wanted"),
        (ATTENTION, {"readers": (2, 2, 4)}, {"readers": jnp.int16}, {}, "readers: got int16, wanted int32"),
        (ATTENTION, {}, {"pages": jnp.int8}, {}, "pages: got int8"),
        (ATTENTION, {"kv_scales": (2, 5, 2, 16)}, {}, {}, "pages: got float32, wanted int8 or float8_e4m3fn"),
        (ATTENTION, {"kv_scales": (2, 4, 2, 16)}, {"pages": jnp.int8}, {}, "kv_scales: got shape"),
        (
            ATTENTION,
            {},
            {},
            {"rows_per_slot": 3},
            "rows_per_slot: got 3, wanted a number that divides the 2 rows of q",
        ),
        (
            ATTENTION,
            {"q": (64, 6, 64), "lengths": (64,), "readers": (2, 2, 4)},
            {},
            {"rows_per_slot": 32},
            "rows_per_slot: got 32, wanted at most 31 with readers",
        ),
        (ATTENTION, {}, {}, {"backend": "cuda"}, 'backend: got "cuda", wanted one of'),
        (PREFILL, {"blocks": (2, 2, 4)}, {}, {}, "counts: got None, wanted the lengths of the lists in blocks"),
        (PREFILL, {"counts": (2, 2)}, {}, {}, "blocks: got None, wanted lists of blocks with counts"),
        (BLOCK, {}, {"mean": jnp.bfloat16}, {}, "mean: got bfloat16, wanted"),
        (BLOCK, {}, {}, {"scale": 0.0}, "scale: got 0.0, wanted a positive number"),
        (CODE, {}, {}, {"page_size": 0}, "page_size: got 0, wanted at least 1 token"),
        (CODE, {}, {}, {"soft_cap": 0.0}, "soft_cap: got 0.0, wanted a positive number or None"),
    ],
)
def test_a_wrong_dtype_or_setting_is_named(operation, shapes, dtypes, settings, message):
    with pytest.raises(ValueError) as caught:
        called(operation, shapes, dtypes, settings)
    assert str(caught.value).startswith(message)


# The softmax.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale: got 0.0, wanted a positive number"),
        ({"soft_cap": -1.0}, "soft_cap: got -1.0, wanted a positive number or None"),
        ({"window": 0}, "window: got 0, wanted at least 1 token, or None"),
    ],
)
def test_a_wrong_setting_of_the_softmax_is_named(wrong, message):
    with pytest.raises(ValueError) as caught:
        Softmax(**{"scale": 1.0} | wrong)
    assert str(caught.value) == message


def test_there_is_a_sink_for_every_query_head_or_none():
    Softmax(scale=1.0).require_heads(4)
    sinks = Softmax(scale=1.0, sink_logits=jnp.zeros(4))
    sinks.require_heads(4)
    with pytest.raises(ValueError, match=r"sink_logits: got shape \(4,\), wanted \(h=6\)"):
        sinks.require_heads(6)
    with pytest.raises((ValueError, TypeCheckError)):
        Softmax(scale=1.0, sink_logits=jnp.zeros((4, 1)))


@pytest.mark.parametrize(
    ("page_size", "head_dim", "rows"),
    [(128, 128, (128, 128)), (128, 64, (64, 128)), (32, 96, (8, 384)), (16, 256, (16, 256)), (2, 96, (1, 192))],
)
def test_rows_of_codes_are_full_lanes_of_full_tokens(page_size, head_dim, rows):
    assert code_rows(page_size, head_dim) == rows
