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


def test_a_module_is_one_key_for_programs_and_its_embedding_is_multiplied_where_it_is_the_head():
    module = Plain(VOCABULARY, num_layers=1, rngs=nnx.Rngs(0))
    found, other = (read_module(module, CONFIG)[0] for _ in range(2))
    assert found == other and hash(found) == hash(other)
    assert found != read_module(Plain(VOCABULARY, rngs=nnx.Rngs(0)), CONFIG)[0]
    assert found.num_multiplied == VOCABULARY * WIDTH + 4 * WIDTH**2 + 2 * 2 * WIDTH**2
    assert found.widest == 2 * WIDTH


def grouped(attention_fn=causal, **parts) -> Any:
    """A module of grouped heads, with more parts."""
    module = Grouped(VOCABULARY, attention_fn=attention_fn, rngs=nnx.Rngs(0))
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def called_as(call, **parts):
    """A module with more parts that is called in another way."""
    module = grouped(**parts)
    module.__class__ = type("Other", (Grouped,), {"__call__": call})
    return module


def then(change, **parts):
    """A module whose logits are changed by `change`, of the module and them."""
    return called_as(lambda self, t, p: change(self, Grouped.__call__(self, t, p)), **parts)


def another_attention(num_heads):
    return nnx.MultiHeadAttention(num_heads, WIDTH, decode=False, rngs=nnx.Rngs(0))


def in_a_scan(self, tokens, positions):
    def layer(x, _):
        return x + self.layers[0](self.norm(x), positions), None

    return self.head(jax.lax.scan(layer, self.embed(tokens), None, length=2)[0])


def in_a_vmap(self, tokens, positions):
    rows = jax.vmap(lambda tokens, positions: Grouped.__call__(self, tokens[None], positions[None])[0])
    return rows(tokens, positions)


def looks_elsewhere(self, tokens, positions):
    return self.head(self.other(self.embed(tokens), self.read[...]))


def of_unlike_heads(self, tokens, positions):
    return Grouped.__call__(self, tokens, positions) + self.other(self.norm(self.embed(tokens)))[..., :1]


def biased(self, tokens, positions):
    attended = self.layers[0].attention_fn(tokens, tokens, tokens, bias=tokens)
    return self.head(self.embed(tokens)) + attended[..., None]


def with_cache():
    module = Plain(VOCABULARY, decode=True, rngs=nnx.Rngs(0))
    for layer in module.attention:
        layer.init_cache((1, 8, WIDTH))
    return module


def tiled(q, k, v):  # query heads shared out in turn, not in groups
    return causal(q, *(jnp.tile(x, (1, 1, 2, 1)) for x in (k, v)))


UNCALLABLE = "cannot be called as module(tokens, positions) on integers [batch, length] (TypeError"
ANOTHER = "uses another kind of attention; the decoder supports softmax"
IN_PARTS = "returns other logits for a sequence processed in parts"
REFUSED = {
    "no attention": (
        lambda: nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(0)),
        "has no part with an attention_fn; have its attention layers call",
    ),
    "uncalled": (lambda: called_as(lambda self, t, p: self.head(self.embed(t))), "does not call the attention_fn"),
    "fails": (lambda: called_as(lambda self, t: t), UNCALLABLE),
    "scan": (lambda: called_as(in_a_scan), "calls its attention_fn within a scan of JAX; call its layers one after"),
    "vmap": (lambda: called_as(in_a_vmap), "calls its attention_fn within a vmap; call its layers on the whole batch"),
    "integers": (lambda: then(lambda _, x: x.astype(int)), "returns int32; logits are real numbers, before any"),
    "one size": (lambda: then(lambda _, x: x[:, :1] * jnp.ones((1, 8, 1))), "returns [1, 8, 61] for tokens of [1, 96]"),
    "one axis": (lambda: then(lambda _, x: x[:, -1]), "returns [2, 61] for"),
    "no array": (lambda: then(lambda _, x: (x,)), "returns tuple for tokens"),
    "NaN": (lambda: then(lambda _, x: x * jnp.nan), "returns logits that are not numbers; look for NaN in its weights"),
    "statistics": (
        lambda: then(
            lambda self, x: self.normal(x, use_running_average=False),
            normal=nnx.BatchNorm(VOCABULARY, rngs=nnx.Rngs(0)),
        ),
        "changes its normal/mean when it is called",
    ),
    "cross": (
        lambda: called_as(looks_elsewhere, other=another_attention(4), read=nnx.Param(jnp.ones((2, 5, WIDTH)))),
        "calls attention_fn with queries [2, 8, 4, 8], keys [2, 5, 4, 8] and values [2, 5",
    ),
    "cache": (with_cache, "has its own cache; make it with decode=False"),
    "half": (
        lambda: Plain(VOCABULARY, dtype=jnp.float16, rngs=nnx.Rngs(0)),
        "has keys in float16; the decoder supports float32 and bfloat16",
    ),
    "unlike heads": (lambda: called_as(of_unlike_heads, other=another_attention(2)), "has layers with different heads"),
    "unhashable": (lambda: grouped(names={"a": {1, 2}}), "has an attribute that cannot be hashed"),
    "bias": (lambda: called_as(biased), "puts a bias on the scores of its attention; the decoder supports softmax"),
    "window": (
        lambda: grouped(
            functools.partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=(LENGTH - 10, 0))
        ),
        ANOTHER,
    ),
    "heads in turn": (lambda: grouped(tiled), ANOTHER),
    "mixes tokens": (lambda: then(lambda _, x: x + jnp.roll(x, 1, axis=1)), IN_PARTS),
    "mixes rows": (lambda: then(lambda _, x: x + jnp.mean(x, axis=0)), IN_PARTS),
    "own positions": (
        lambda: called_as(lambda self, t, p: Grouped.__call__(self, t, jnp.indices(t.shape)[1])),
        IN_PARTS,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_sentence(name):
    make, words = REFUSED[name]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(UsageError) as refusal:  # flax mixes dtypes of its own
        read_module(make(), CONFIG)
    said = str(refusal.value)
    assert words in said and "\n" not in said and said.endswith(".")


def test_tokens_that_a_module_rules_out_stay_so_and_sensitivities_are_of_the_heads_there_are():
    def ruled_out(self, logits):
        return jnp.where(jnp.arange(VOCABULARY) < 50, logits, -jnp.inf)

    assert read_module(then(ruled_out), CONFIG)[0].vocab_size == VOCABULARY
    other = Calibration(sensitivity=Table(np.ones((2, 4, 1), np.float32)))
    with pytest.raises(UsageError, match=r"sensitivity has the shape \[2, 4, 1\] and Grouped the heads \[2, 2, 2\]; "):
        read_module(grouped(), ModuleConfig(max_positions=LENGTH, calibration=other))
