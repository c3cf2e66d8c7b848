"""What a decoder needs, against formulas, published sizes and the compiler's own account."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from small_model import MODEL, configuration

from et_jax.control.compression import named
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting
from et_jax.decode.state import empty
from et_jax.errors import UsageError
from et_jax.models.config import ModelConfig
from et_jax.models.params import describe
from et_jax.serve.memory.preflight import decoder_bytes, plan, step_bytes
from et_jax.types import replace
from scripts.measuring.shapes import LLAMA_3_8B

GB = 10**9
WIDE = replace(MODEL, vocab_size=20_000, num_layers=1, windows=(None,))


def serving(**changes) -> DecoderConfig:
    """The decoder of eight sequences of Llama 3 8B."""
    sizes = {"num_slots": 8, "batch": 8, "page_size": 16, "chunk": 16, "prefill_batch": 64, "max_length": 8192}
    return configuration(**{"model": LLAMA_3_8B, "num_pages": 2, "cache_dtype": jnp.bfloat16} | sizes | changes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_page_is_what_its_parts_are(dtype) -> None:
    """Per layer and KV head: tokens in the cache's dtype, their box, mean and radius, and codes; and surprisals."""
    config = configuration(cache_dtype=dtype, dtype=jnp.float32, keep=frozenset({"codes", "surprisals"}))
    c, s, e, size = config.model, config.page_size, 128, jnp.dtype(dtype).itemsize
    scales, box = (s * 2 * 4, 4) if size == 1 else (0, size)
    head = s * e * size + scales + e * box + e * 4 + 4 + s * c.head_dim
    table = 4 + 4  # its reference count, its place among the free pages
    assert decoder_bytes(config)[0] == c.num_layers * c.num_kv_heads * head + table + s * 4


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (MODEL, {"num_slots": 16, "batch": 16}),
        (WIDE, {"prefill_batch": 16}),
        (WIDE, {"prefill_batch": 64, "keep": frozenset({"surprisals"})}),
        (WIDE, {"draft": Drafting(most=4)}),
    ],
)
def test_a_step_is_estimated_from_above_but_not_wildly(shape: ModelConfig, changes: dict) -> None:
    """The compiler says what it set aside; its buffers for what a run reports are small change."""
    config = configuration(model=shape, **changes)
    bound, state = decoder(config), jax.eval_shape(partial(empty, config))
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), describe(config.model))
    number = config.prefill_batch // config.chunk
    rows = jax.ShapeDtypeStruct((number,), jnp.int32)
    tokens, last = jax.ShapeDtypeStruct((number, config.chunk), jnp.int32), jax.ShapeDtypeStruct((number,), bool)
    programs = [
        bound.variants[bound.config.full_variant].lower((params,), state, jnp.int32(1)),  # type: ignore[attr-defined]
        bound.prefill.lower((params,), state, rows, tokens, rows, last),  # type: ignore[attr-defined]
    ]
    measured = max(program.compile().memory_analysis().temp_size_in_bytes for program in programs)
    assert measured <= step_bytes(config) + 50_000 <= 3 * measured


def test_a_compression_is_estimated_from_above_whatever_the_pool() -> None:
    """The pool is written where it lies: what is set aside does not grow with it."""
    for name, num_pages in (("latent", 2000), ("adakv", 2000), ("adakv", 200)):
        config = configuration(num_pages=num_pages, max_length=1024, compression=named(name, 256))
        state = jax.eval_shape(partial(empty, config))
        program = decoder(config).compress.lower(state, jnp.int32(0)).compile()  # type: ignore[attr-defined]
        assert program.memory_analysis().temp_size_in_bytes <= step_bytes(config) + 100_000


def test_the_cache_takes_what_it_wants_or_what_is_left() -> None:
    config = configuration()
    blocks = 16  # 64 tokens in pages of 4
    ample = plan(config, GB)
    assert ample.num_pages == ample.wanted_pages == 3 * blocks + 1
    assert ample.total == ample.weights + ample.state + ample.step + ample.num_pages * ample.page
    assert "1.0 GB that may be used" in ample.table()[-1] and ample.table()[1].endswith("49 pages of 8.2 kB")
    for pages in (48, blocks + 1):
        tight = plan(config, ample.total - ample.cache + (pages + 1) * ample.page - 1)
        assert tight.num_pages == pages and tight.total <= tight.memory < tight.total + tight.page
        assert f"{pages} pages" in tight.table()[1] and "of 49 for every sequence at once" in tight.table()[1]
    with pytest.raises(UsageError):
        plan(config, ample.total - ample.cache + (blocks + 1) * ample.page - 1)
    assert plan(config, GB, num_pages=5).num_pages == 5


def test_a_refusal_names_the_most_that_fits() -> None:
    slots, batched = serving(num_slots=512, batch=512), "512 sequences at once; take quantize int8, or take "
    cached = "the cache of one sequence of 8192 tokens, .*; take quantize int8, or take cache_dtype int8, or take "
    for config, memory, words, fields in (
        (slots, 18 * GB, batched + "max_num_seqs ", ["num_slots", "batch"]),
        (serving(), 17 * GB, cached + "max_model_len ", ["max_length"]),
    ):
        with pytest.raises(UsageError, match=words + r"\d+\.$") as refusal:
            plan(config, memory)
        most = int(str(refusal.value).rpartition(" ")[2][:-1])
        assert plan(replace(config, **dict.fromkeys(fields, most)), memory).total <= memory
        with pytest.raises(UsageError):
            plan(replace(config, **dict.fromkeys(fields, most + 1)), memory)
    with pytest.raises(UsageError, match=r"for the cache, .*; take num_pages \d+") as refusal:
        plan(serving(), 20 * GB, num_pages=5000)
    pages = int(str(refusal.value).split("num_pages ")[1].split(",")[0].rstrip("."))
    assert plan(serving(), 20 * GB, num_pages=pages).total <= 20 * GB


def test_a_refusal_says_that_fewer_bits_would_do() -> None:
    half = jnp.bfloat16
    wide, short = serving(cache_dtype=jnp.float32), serving(max_length=2048)
    wide_cache = replace(wide, dtype=half)
    ample = plan(replace(wide_cache, cache_dtype=half), 24 * GB)
    least = ample.total - ample.cache + 513 * ample.page  # one sequence of 8192 tokens in pages of 16
    for config, memory, words, remedy in (
        (wide, 24 * GB, r"32\.1 GB for weights in float32, .*; take bfloat16, or", {"cache_dtype": half}),
        (wide_cache, least, r"16\.1 GB for weights in bfloat16, .*; take cache_dtype bfloat16", {"cache_dtype": half}),
        (short, 12 * GB, r"16\.1 GB for weights in bfloat16, .*; take quantize int8\.$", {"quantize": "int8"}),
    ):
        with pytest.raises(UsageError, match=words):
            plan(config, memory)
        assert plan(replace(config, **remedy), memory).total <= memory


def test_weights_in_8_bits_have_a_scale_for_each_output() -> None:
    """8.0 GB: a byte for each of 8.03 billion numbers, and 4 for each output; norms are not worth a digit."""
    config = serving(max_length=2048, quantize="int8")
    assert plan(config, 12 * GB).weights == pytest.approx(8.04e9, abs=5e6)
    words = r"8\.0 GB for weights in int8, .*; choose a model of at most 2 billion weights in bfloat16, or a larger"
    with pytest.raises(UsageError, match=words):
        plan(config, 8 * GB)


def test_replicas_of_one_memory_share_the_weights_and_nothing_else() -> None:
    config = configuration()
    one, two = plan(config, GB), plan(config, GB, replicas=2)
    assert two.num_pages == one.num_pages and two.total == 2 * one.total - one.weights
    assert "with 2 replicas, of 1.0 GB" in two.table()[-1]
    tight = plan(config, two.total - 1, replicas=2)
    assert tight.num_pages == one.num_pages - 1 and tight.total <= two.total - 1
    with pytest.raises(UsageError, match=r"for each of 2 replicas; take fewer replicas\.$"):
        plan(config, one.total, replicas=2, num_pages=one.num_pages)
