"""A state on disk comes back bit for bit, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax import decode as hall
from et_jax import sampling, snapshots
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import initialise
from et_jax.state import DecoderConfig, DecodeState, Request
from et_jax.types import UsageError, pytree, replace

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
    norm_eps=1e-6,
    rope_theta=10000.0,
    windows=(None,),
)


def fresh_decoder() -> hall.Decoder:
    return hall.decoder(
        DecoderConfig(
            model=MODEL,
            num_slots=2,
            batch=2,
            page_size=4,
            num_pages=9,
            max_length=32,
            chunk=4,
            part=4,
            max_steps=20,
            cache_dtype=jnp.bfloat16,
            backend="xla",
            penalties=True,
        )
    )


def begin(d: hall.Decoder, seed: int) -> DecodeState:
    """A sampled sequence of two in the second slot, whose prompt is one token."""
    numbers = dict(temperature=0.9, top_p=0.95, min_p=0.0, repetition_penalty=1.2)
    numbers |= dict(presence_penalty=0.1, frequency_penalty=0.1)
    request = Request(
        token=jnp.int32(3),
        limit=jnp.int32(20),
        arrival=jnp.int32(0),
        urgency=jnp.float32(0),
        index=jnp.int32(0),
        stop_ids=jnp.full(8, -1, jnp.int32),
        logprobs=jnp.bool_(False),
        sampling=sampling.Sampling(
            **{name: jnp.float32(value) for name, value in numbers.items()},
            top_k=jnp.int32(50),
            key=jax.random.key_data(jax.random.key(seed)),
        ),
        in_prompt=jnp.arange(64) == 3,
    )
    return d.insert(d.empty(), 1, request)


def written(output, ran) -> list[int]:
    return np.asarray(output.token[: int(ran), 1]).tolist()


def test_a_text_stopped_on_disk_goes_on_in_a_fresh_decoder_as_if_it_had_not(tmp_path):
    params = initialise(MODEL, jax.random.key(0), jnp.bfloat16)
    d = fresh_decoder()
    whole = written(*d.decode(params, begin(d, 7), 20)[1:])
    state, output, ran = d.decode(params, begin(d, 7), 9)
    snapshots.save(tmp_path / "middle", state)
    later = fresh_decoder()
    back = snapshots.restore(tmp_path / "middle", jax.eval_shape(later.empty))
    assert isinstance(back, DecodeState)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert old.dtype == new.dtype and np.asarray(old).tobytes() == np.asarray(new).tobytes()
    rest = written(*later.decode(params, back, 20)[1:])
    assert written(output, ran) + rest == whole and len(rest) == 11


@pytree
class Tree:
    values: jax.Array
    parts: tuple[jax.Array, ...]
    notes: dict
    absent: jax.Array | None


def tree() -> Tree:
    odd = jnp.asarray([np.nan, np.inf, -0.0, 1e-45, 3.0], jnp.float32)
    notes = {"clock": {"last": jnp.bfloat16(0.3)}, "empty": {}}
    return Tree(values=odd, parts=(jnp.uint32(2**32 - 1), jnp.asarray([[True, False]])), notes=notes, absent=None)


@pytest.fixture
def saved(tmp_path):
    snapshots.save(tmp_path / "tree", tree())
    return tmp_path / "tree"


@pytest.mark.parametrize("like", [tree, lambda: jax.eval_shape(tree)], ids=["arrays", "shapes"])
def test_every_bit_and_the_structure_come_back(saved, like):
    back = snapshots.restore(saved, like())
    assert jax.tree.structure(back) == jax.tree.structure(tree())
    for old, new in zip(jax.tree.leaves(tree()), jax.tree.leaves(back), strict=True):
        assert new.dtype == old.dtype and np.asarray(new).tobytes() == np.asarray(old).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": jnp.zeros(6)}, r"values is float32\[5\] in it and float32\[6\] was asked for"),
        ({"values": jnp.zeros(5, jnp.int32)}, r"values is float32\[5\] in it and int32\[5\] was asked for"),
        ({"parts": (jnp.uint32(0),)}, r"parts/1 is bool\[1, 2\] in it and absent was asked for"),
        ({"absent": jnp.zeros(2)}, r"absent is absent in it and float32\[2\] was asked for"),
        ({"notes": {"clock": {"first": jnp.bfloat16(0)}}}, r"notes/clock/first is absent in it"),
    ],
)
def test_another_shape_is_told_before_anything_is_read(saved, changes, message):
    with pytest.raises(UsageError, match=message):
        snapshots.restore(saved, replace(tree(), **changes))


def test_what_save_did_not_write_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere is not a folder; give one that"):
        snapshots.restore(tmp_path / "nowhere", tree())
    (tmp_path / "file").write_text("text")
    with pytest.raises(UsageError, match="file is not a folder"):
        snapshots.restore(tmp_path / "file", tree())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no readable snapshot"):
        snapshots.restore(tmp_path / "empty", tree())


@pytest.mark.parametrize("damage", ["cut", "flipped", "lost"])
def test_a_damaged_snapshot_is_refused(saved, damage):
    data = [file for file in saved.rglob("*") if file.is_file() and file.parent.name == "d"]
    assert data
    for file in data:
        held = bytearray(file.read_bytes())
        if damage == "lost":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(held[: len(held) // 2])
        else:
            held[len(held) // 2] ^= 1
            file.write_bytes(held)
    with pytest.raises(UsageError, match="save it again"):
        snapshots.restore(saved, tree())


def test_what_is_there_is_never_overwritten(saved):
    with pytest.raises(UsageError, match="exists already; choose another folder"):
        snapshots.save(saved, tree())


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(UsageError, match="cannot be written"):
        snapshots.save(tmp_path / "file" / "below", tree())
