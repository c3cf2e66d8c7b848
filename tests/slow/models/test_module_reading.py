"""What is seen of a module before it serves: its shape by formula, and one sentence for each that cannot be served."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH, WIDTH, Grouped, Plain, causal

from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration
from et_jax.models.module import ModuleConfig
from et_jax.models.module_reading import causal as reference
from et_jax.models.module_reading import read_module
from et_jax.types import Table

pytestmark = pytest.mark.usefixtures("hardly_optimised")

VOCABULARY = 61
CONFIG = ModuleConfig(max_positions=LENGTH)


def test_the_shape_of_a_module_is_found():
    found, weights = read_module(Grouped(VOCABULARY, num_layers=3, rngs=nnx.Rngs(0)), CONFIG)
    shape = found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim, found.vocab_size
    assert shape == (3, 4, 2, 8, VOCABULARY)
    assert (found.architecture, found.windows, found.max_positions) == ("Grouped", (None,) * 3, LENGTH)
    head, layer = VOCABULARY * WIDTH, WIDTH * 8 * (4 + 2 + 2 + 4)
    assert found.num_multiplied == head + 3 * layer  # the embedding is looked up
    assert found.num_weights == 2 * head + 3 * layer + WIDTH
    assert found.weight_bytes == 4 * found.num_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert found.widest == WIDTH


def test_an_embedding_that_is_the_head_too_is_multiplied():
    found, _ = read_module(Plain(VOCABULARY, num_layers=1, rngs=nnx.Rngs(0)), CONFIG)
    assert found.num_multiplied == VOCABULARY * WIDTH + 4 * WIDTH**2 + 2 * 2 * WIDTH**2
    assert found.widest == 2 * WIDTH


def test_a_module_is_one_key_for_programs():
    module = Plain(VOCABULARY, rngs=nnx.Rngs(0))
    one, other = (read_module(module, CONFIG)[0] for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != read_module(Plain(VOCABULARY, num_layers=1, rngs=nnx.Rngs(0)), CONFIG)[0]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_reference_is_jax_s_own(groups):
    q, k, v = (jax.random.normal(key, (2, 7, 4, 8)) for key in jax.random.split(jax.random.key(0), 3))
    k, v = k[:, :, ::groups], v[:, :, ::groups]
    whole = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(reference(q, k, v), whole, atol=1e-5)
    np.testing.assert_allclose(reference(q[:, 4:], k, v), whole[:, 4:], atol=1e-5)


def plain(**settings):
    return Plain(VOCABULARY, rngs=nnx.Rngs(0), **settings)


def grouped(attention_fn=causal) -> Any:
    return Grouped(VOCABULARY, attention_fn=attention_fn, rngs=nnx.Rngs(0))


def with_call(call, module=None):
    """A module that is called in another way."""
    module = grouped() if module is None else module
    module.__class__ = type("Other", (type(module),), {"__call__": call})
    return module


def no_attention():
    module = grouped()
    for layer in module.layers:
        del layer.attention_fn
    return module


def counts_calls(self, tokens, positions):
    self.calls[...] += 1
    return Grouped.__call__(self, tokens, positions)


def counting():
    module = grouped()
    module.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    return with_call(counts_calls, module)


def in_a_scan(self, tokens, positions):
    def layer(x, _):
        return x + self.layers[0](self.norm(x), positions), None

    return self.head(jax.lax.scan(layer, self.embed(tokens), None, length=2)[0])


def in_a_vmap(self, tokens, positions):
    rows = jax.vmap(lambda tokens, positions: Grouped.__call__(self, tokens[None], positions[None])[0])
    return rows(tokens, positions)


def in_a_branch(self, tokens, positions):
    x = self.embed(tokens)
    return self.head(jax.lax.cond(positions[0, 0] < 9, lambda: self.layers[0](x, positions), lambda: x))


def of_one_size(self, tokens, positions):
    return Grouped.__call__(self, tokens, positions)[:, :1] * jnp.ones((1, 8, 1))


def drops(self, tokens, positions):
    return self.drop(Grouped.__call__(self, tokens, positions), deterministic=False)


def dropping():
    module = grouped()
    module.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    return with_call(drops, module)


def normed(self, tokens, positions):
    return self.normal(Grouped.__call__(self, tokens, positions), use_running_average=False)


def norming():
    module = grouped()
    module.normal = nnx.BatchNorm(VOCABULARY, rngs=nnx.Rngs(0))
    return with_call(normed, module)


def looks_elsewhere():
    module = grouped()
    module.other = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    module.read = nnx.Param(jnp.ones((2, 5, WIDTH)))
    return with_call(lambda self, t, p: self.head(self.other(self.embed(t), self.read[...])), module)


def broken():
    module = grouped()
    module.head.kernel[...] = module.head.kernel[...] * jnp.nan
    return module


def with_sensitivity(shape):
    return ModuleConfig(max_positions=LENGTH, calibration=Calibration(sensitivity=Table(np.ones(shape, np.float32))))


def mixes_tokens(self, tokens, positions):
    logits = Grouped.__call__(self, tokens, positions)
    return logits + jnp.roll(logits, 1, axis=1)


def mixes_rows(self, tokens, positions):
    logits = Grouped.__call__(self, tokens, positions)
    return logits + jnp.mean(logits, axis=0)


def counts_for_itself(self, tokens, positions):
    return Grouped.__call__(self, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))


def windowed(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(LENGTH - 10, 0))


def rotating(q, k, v):
    return causal(jnp.roll(q, 1, axis=-1), k, v)


def tiled(q, k, v):  # query heads shared out in turn, not in groups
    return causal(q, *(jnp.tile(x, (1, 1, 2, 1)) for x in (k, v)))


def with_cache():
    module = plain(decode=True)
    for layer in module.attention:
        layer.init_cache((1, 8, WIDTH))
    return module


def unhashable():
    module = grouped()
    module.names = {"a": {1, 2}}
    return module


ANOTHER = "has an attention of another kind; the decoder serves softmax"
IN_PARTS = "gives other logits for a text that is read in parts"
REFUSED = {
    "no attention": (no_attention, "has no part with an attention_fn; have its attention layers call"),
    "uncalled": (lambda: with_call(lambda self, t, p: self.head(self.embed(t))), "does not call the attention_fn"),
    "fails": (
        lambda: with_call(lambda self, t: t),
        "cannot be called as module(tokens, positions) on integers [batch, length] (TypeError",
    ),
    "scan": (lambda: with_call(in_a_scan), "calls its attention_fn within a scan of JAX; call its layers one after"),
    "branch": (lambda: with_call(in_a_branch), "calls its attention_fn within a cond of JAX; call its layers one"),
    "vmap": (lambda: with_call(in_a_vmap), "calls its attention_fn within a vmap; call its layers on the whole batch"),
    "integers": (
        lambda: with_call(lambda self, t, p: Grouped.__call__(self, t, p).astype(jnp.int32)),
        "returns int32; logits are real numbers, before any softmax or argmax",
    ),
    "one size": (lambda: with_call(of_one_size), "returns [1, 8, 61] for tokens of [1, 96]; it must return logits"),
    "a mask": (lambda: with_call(lambda self, t, p, mask: t), "missing 1 required positional argument: 'mask'"),
    "dropout": (dropping, "changes its drop/rngs/count when it is called"),
    "statistics": (norming, "changes its normal/mean when it is called"),
    "cross": (looks_elsewhere, "calls attention_fn with queries [2, 8, 4, 8], keys [2, 5, 4, 8] and values [2, 5"),
    "NaN": (broken, "returns logits that are no numbers; look for NaN in its weights"),
    "one axis": (lambda: with_call(lambda self, t, p: Grouped.__call__(self, t, p)[:, -1]), "returns [2, 61] for"),
    "no array": (lambda: with_call(lambda self, t, p: (Grouped.__call__(self, t, p),)), "returns tuple for tokens"),
    "cache": (with_cache, "keeps a cache of its own; make it with decode=False"),
    "writes": (counting, "changes its calls when it is called"),
    "half": (lambda: plain(dtype=jnp.float16), "has keys in float16; the decoder serves float32 and bfloat16"),
    "unlike heads": (
        lambda: with_call(
            lambda self, t, p: Grouped.__call__(self, t, p) + self.other(self.norm(self.embed(t)))[..., :1],
            unlike(),
        ),
        "has layers with different heads",
    ),
    "unhashable": (unhashable, "holds an attribute that cannot be hashed"),
    "bias": (lambda: biased(), "puts a bias on the scores of its attention; the decoder serves softmax"),
    "scale": (lambda: grouped(functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=1.0)), ANOTHER),
    "not causal": (lambda: grouped(jax.nn.dot_product_attention), ANOTHER),
    "window": (lambda: grouped(windowed), ANOTHER),
    "rotary inside": (lambda: grouped(rotating), ANOTHER),
    "heads in turn": (lambda: grouped(tiled), ANOTHER),
    "mixes tokens": (lambda: with_call(mixes_tokens), IN_PARTS),
    "mixes rows": (lambda: with_call(mixes_rows), IN_PARTS),
    "own positions": (lambda: with_call(counts_for_itself), IN_PARTS),
}


def test_tokens_that_a_module_rules_out_stay_so():
    def ruled_out(self, tokens, positions):
        return jnp.where(jnp.arange(VOCABULARY) < 50, Grouped.__call__(self, tokens, positions), -jnp.inf)

    found, _ = read_module(with_call(ruled_out), CONFIG)
    assert found.vocab_size == VOCABULARY


def test_sensitivities_are_of_the_heads_there_are():
    with pytest.raises(UsageError, match=r"sensitivity has the shape \[2, 4, 1\] and Grouped the heads \[2, 2, 2\]; "):
        read_module(grouped(), with_sensitivity((2, 4, 1)))


def unlike():
    module = grouped()
    module.other = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=nnx.Rngs(0))
    return module


def biased():
    return with_call(
        lambda self, t, p: self.head(self.embed(t)) + self.layers[0].attention_fn(t, t, t, bias=t)[..., None]
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_sentence(name):
    make, words = REFUSED[name]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(UsageError) as refusal:  # flax mixes dtypes of its own
        read_module(make(), CONFIG)
    said = str(refusal.value)
    assert words in said and "\n" not in said and said.endswith(".")
