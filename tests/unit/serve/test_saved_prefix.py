"""A file of a saved prefix holds its bytes, or is refused in one sentence."""

import ml_dtypes
import numpy as np
import pytest

from et_jax.errors import UsageError
from et_jax.serve.saved_prefix import Prefix, read, write

TOKENS = list(range(8))
KINDS = ("bfloat16", "float8_e4m3fn", "float32")
DEPENDS = {"model": "abc", "page_size": 4, "cache": [[kind, [2, 3], [4, 5]] for kind in KINDS]}
"""Two heads, three layers in a stack, and two pages of four tokens and five numbers."""


@pytest.fixture
def prefix():
    numbers = np.random.default_rng(0).normal(size=(2, 3, 2, 4, 5))
    return Prefix(TOKENS, [numbers.astype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32)])


def test_what_is_written_is_read_in_every_dtype(prefix, tmp_path):
    write(tmp_path / "prefix", prefix, DEPENDS)
    found = read(tmp_path / "prefix", DEPENDS)
    assert found.tokens == TOKENS
    for one, other in zip(found.arrays, prefix.arrays, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.parametrize("damage", ["cut", "bit of a page", "bit of a token", "bit of the facts", "empty", "other"])
def test_a_damaged_file_is_refused(prefix, tmp_path, damage):
    path = tmp_path / "prefix"
    write(path, prefix, DEPENDS)
    data = bytearray(path.read_bytes())
    tokens, page = np.asarray(TOKENS, np.int32).tobytes(), prefix.arrays[2].tobytes()
    places = {"bit of a page": page, "bit of a token": tokens, "bit of the facts": b"abc"}
    if damage in places:
        data[data.index(places[damage])] ^= 1
    path.write_bytes({"cut": data[:-100], "empty": b"", "other": b"{}" * 100}.get(damage, data))
    with pytest.raises(UsageError, match=f"{path} is damaged, or no saved prefix; save the prefix again"):
        read(path, DEPENDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "b"}, "with another model, adapter or dtype; save the prefix again with this one"),
        ({"page_size": 8}, "with page_size 4, and here it is 8; load the model so, or save the prefix again"),
        (
            {"cache": DEPENDS["cache"][:2]},
            "by a control or version that stores other pages; load it under that one",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(prefix, tmp_path, changes, said):
    write(tmp_path / "prefix", prefix, DEPENDS)
    with pytest.raises(UsageError, match=said):
        read(tmp_path / "prefix", DEPENDS | changes)
    with pytest.raises(UsageError, match="is no file; name one that --save-prefix"):
        read(tmp_path, DEPENDS)
