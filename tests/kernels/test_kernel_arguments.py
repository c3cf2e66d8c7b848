"""What the operations and the settings of the softmax refuse, each in one sentence that names the argument."""

from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.checks import code_rows
from et_jax.pallas.paged_attention import paged_attention
from et_jax.pallas.paged_prefill import paged_prefill
from et_jax.softmax import Softmax


def zeros(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.zeros(shape, dtype)


def ints(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jnp.zeros(shape, dtype)


PAGED = {"pages": zeros(2, 5, 16, 128), "page_table": ints(2, 4), "softmax": Softmax(scale=1.0)}
LISTS = {"blocks": ints(2, 2, 4), "counts": ints(2, 2)}
SCORED = {"q": zeros(2, 6, 64), "key_box": zeros(2, 5, 128), "page_table": ints(2, 4), "lengths": ints(2)}
SCORED |= {"scale": 1.0, "page_size": 16}
RIGHT: dict[Any, dict[str, Any]] = {
    paged_attention: PAGED | LISTS | {"q": zeros(2, 6, 64), "lengths": ints(2)},
    paged_prefill: PAGED | {"q": zeros(2, 8, 6, 64), "starts": ints(2)},
    block_scores: SCORED | {"mean": zeros(2, 5, 128)},
    code_scores: SCORED | {"key_codes": ints(2, 5, 8, 128, dtype=jnp.int8)},
    Softmax: {"scale": 1.0},
}
IN_8_BITS = {"pages": ints(2, 5, 16, 128, dtype=jnp.int8)}
MANY_ROWS = {"q": zeros(64, 6, 64), "lengths": ints(64), "readers": ints(2, 2, 4), "rows_per_slot": 32}


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (paged_attention, {"q": zeros(2, 7, 64)}, "q: got .*wanted"),
        (paged_attention, {"q": zeros(2, 6, 65)}, "pages: got .*wanted"),
        (paged_attention, {"pages": zeros(2, 5, 16, 192)}, "pages: got .*wanted"),
        (paged_attention, {"blocks": ints(2, 2, 0)}, "blocks: got .*wanted"),
        (paged_attention, {"q": zeros(2, 6, 64, dtype=jnp.float16)}, "q: got float16, wanted"),
        (paged_attention, {"readers": ints(2, 2, 4, dtype=jnp.int16)}, "readers: got int16, wanted int32"),
        (paged_attention, IN_8_BITS, "pages: got int8"),
        (paged_attention, {"kv_scales": zeros(2, 5, 2, 16)}, "pages: got float32, wanted int8 or float8_e4m3fn"),
        (paged_attention, IN_8_BITS | {"kv_scales": zeros(2, 4, 2, 16)}, "kv_scales: got shape"),
        (paged_attention, {"rows_per_slot": 3}, "rows_per_slot: got 3, wanted a number that divides the 2 rows of q"),
        (paged_attention, MANY_ROWS, "rows_per_slot: got 32, wanted at most 31 with readers"),
        (paged_attention, {"backend": "cuda"}, 'backend: got "cuda", wanted one of'),
        (paged_prefill, LISTS | {"counts": ints(2, 3)}, "counts: got .*wanted"),
        (paged_prefill, {"blocks": ints(2, 2, 4)}, "counts: got None, wanted the lengths of the lists in blocks"),
        (paged_prefill, {"counts": ints(2, 2)}, "blocks: got None, wanted lists of blocks with counts"),
        (block_scores, {"q": zeros(2, 7, 64)}, "q: got .*wanted"),
        (block_scores, {"q": zeros(2, 6, 65)}, "key_box: got .*wanted"),
        (block_scores, {"mean": zeros(2, 5, 128, dtype=jnp.bfloat16)}, "mean: got bfloat16, wanted"),
        (block_scores, {"scale": 0.0}, "scale: got 0.0, wanted a positive number"),
        (code_scores, {"key_codes": ints(2, 5, 8, 127, dtype=jnp.int8)}, "key_codes: got .*wanted"),
        (code_scores, {"page_size": 0}, "page_size: got 0, wanted at least 1 token"),
        (code_scores, {"soft_cap": 0.0}, "soft_cap: got 0.0, wanted a positive number or None"),
        (Softmax, {"scale": 0.0}, "scale: got 0.0, wanted a positive number$"),
        (Softmax, {"soft_cap": -1.0}, "soft_cap: got -1.0, wanted a positive number or None$"),
        (Softmax, {"window": 0}, "window: got 0, wanted at least 1 token, or None$"),
    ],
)
def test_a_wrong_argument_is_named(function, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**RIGHT[function] | change)


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
