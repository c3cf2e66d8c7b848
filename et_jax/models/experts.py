"""Mixtures of experts: a router gives every token a few feed-forwards of many (Shazeer et al. 2017, Mixtral 2024).

    gate -> choose -> mixed

Which experts a token goes to, and the bits of what they make of it, depend on that token alone, however many stand
beside it. The axis letter `e` is experts, `c` the choices of a token.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.models.config import Activation, ExpertConfig
from et_jax.models.layers import feed_forward, gated
from et_jax.models.stacks import entry
from et_jax.models.weights import Dense, Weight
from et_jax.sums import rounded, softmax, total
from et_jax.types import pytree, replace

Form = Literal["loop", "ragged", "every"]
"""How experts are multiplied with: those touched one after another, by ragged products, or every one with every token.

The loop reads the experts that are touched, in place. The others have a gradient. Ragged products of weights that lie
[out, in] read all of them on a CPU, and begin with a transposed copy of all of them where they are compiled for a TPU
or a GPU. To multiply every expert takes as many times the products as there are experts to a choice, in a few large
ones: for the training of few and small experts on a CPU.
"""

_UNSTABLE = 8  # outputs past a multiple of 64 up to which a float32 product on a CPU depends on the rows beside it
_FEWEST, _MOST = 4, 32  # rows that one turn of the loop multiplies: fewer cost as much, more are mostly padding


@pytree
class SharedExpert:
    """An expert that every token goes to, weighed by the sigmoid of `router`."""

    router: Float[Array, "1 w"]
    gate: Weight
    up: Weight
    down: Weight


@pytree
class Experts:
    """Weights of a layer's experts: `gate` and `up` are "e f w", `down` is "e w f", [expert, out, in].

    Biases are None where a family has none. Where `turn` is given the three are those of all layers of a stack, led by
    the layer, and this one is the one there: a loop over experts that are touched would begin with a copy of all of
    them, were they cut out of the stack.
    """

    router: Float[Array, "e w"]
    gate: Weight
    up: Weight
    down: Weight
    shared: SharedExpert | None
    router_bias: Float[Array, " e"] | None = None
    gate_bias: Float[Array, "e f"] | None = None
    up_bias: Float[Array, "e f"] | None = None
    down_bias: Float[Array, "e w"] | None = None
    turn: Int[Array, ""] | None = None

    def of_turn(self, turn: int | Int[Array, ""]) -> "Experts":
        """Return the experts of one layer, of those of a stack."""
        small = ("router", "shared", "router_bias", "gate_bias", "up_bias", "down_bias")
        taken = jax.tree.map(partial(entry, number=turn), {name: getattr(self, name) for name in small})
        return replace(self, **taken, turn=jnp.asarray(turn, jnp.int32))

    def one(self, weight: Weight, number: Int[Array, ""]) -> Weight:
        """Return the matrix that an expert has of `gate`, `up` or `down`."""
        return weight.one_of(number) if self.turn is None else weight.one_of(self.turn, number)

    def all(self, weight: Weight) -> Weight:
        """Return the matrices that the experts of the layer have of `gate`, `up` or `down`."""
        return weight if self.turn is None else weight.one_of(self.turn)


@pytree
class Choice:
    """The experts each token goes to, likeliest first, and what they weigh: `e` experts stand for none, of weight 0."""

    expert: Int[Array, "n c"]
    weight: Float[Array, "n c"]

    def touched(self, num_experts: int) -> Bool[Array, " e"]:
        """Return which experts any token goes to."""
        return jnp.zeros(num_experts, bool).at[self.expert.reshape(-1)].set(True, mode="drop")


def gate(experts: Experts, x: Float[Array, "n w"]) -> Float[Array, "n e"]:
    """Return the probability that the router gives each expert, float32."""
    return softmax(_plus(_scores(x, experts.router), experts.router_bias))


def choose(
    config: ExpertConfig,
    probability: Float[Array, "n e"],
    count: Callable[[Float[Array, "n c"]], Int[Array, " n"]] | None = None,
) -> Choice:
    """Return the likeliest experts of every token: as many as trained, or `count` of them, given how likely these are.

    Their weights are their probabilities, over their sum where the family has them so.
    """
    weight, expert = jax.lax.top_k(probability, config.num_per_token)
    if count is not None:
        kept_mask = jnp.arange(config.num_per_token) < count(weight)[:, None]
        weight, expert = jnp.where(kept_mask, weight, 0.0), jnp.where(kept_mask, expert, config.num_experts)
    if config.normalised:
        weight = weight / jnp.maximum(total(weight), jnp.finfo(jnp.float32).tiny)[..., None]
    return Choice(expert=expert, weight=weight)


def mixed(
    experts: Experts, x: Float[Array, "n w"], choice: Choice, form: Form, activation: Activation = "silu"
) -> Float[Array, "n w"]:
    """Return what the chosen experts make of every token, weighed and summed in float32, in the dtype of `x`.

    `activation` is that of the chosen ones; the shared one's is SwiGLU.
    """
    return summed(experts, x, choice, form, activation).astype(x.dtype)


def summed(
    experts: Experts, x: Float[Array, "n w"], choice: Choice, form: Form, activation: Activation = "silu"
) -> Float[Array, "n w"]:
    """Return what `mixed` does in float32, so that parts of the experts' widths can be added up."""
    if form == "every":
        out = _by_every(experts, x, choice, activation)
    else:
        out = _by_choice(experts, x, choice, form, activation)
    if experts.shared is not None:
        one = experts.shared
        share = jax.nn.sigmoid(_scores(x, one.router))
        out = out + rounded(share * feed_forward(x, one.gate, one.up, one.down).astype(jnp.float32))
    return out


def _by_choice(
    experts: Experts, x: Float[Array, "n w"], choice: Choice, form: Form, activation: Activation
) -> Float[Array, "n w"]:
    """The weighed sum of what the chosen experts make of each token, multiplied by choice."""
    num_tokens, width = x.shape
    of_choice = (_by_loop if form == "loop" else _by_ragged_products)(experts, x, choice.expert, activation)
    weighed = choice.weight[..., None] * of_choice.reshape(num_tokens, -1, width)
    return total(rounded(jnp.where(choice.weight[..., None] > 0, weighed, 0.0)), axis=1)


def _scores(x: Float[Array, "n w"], router: Float[Array, "o w"]) -> Float[Array, "n o"]:
    """`x @ router.T` in float32, of outputs that are padded to a number at which they do not depend on the rows."""
    outputs = router.shape[0]
    if 0 < outputs % 64 <= _UNSTABLE:
        router = jnp.pad(router, ((0, _UNSTABLE), (0, 0)))
    return jnp.einsum("ni,oi->no", x, router, preferred_element_type=jnp.float32)[:, :outputs]


def _in_order(expert: Int[Array, "n c"], num_experts: int) -> tuple[Int[Array, " nc"], Int[Array, " e"]]:
    """The choices of all tokens, counted through, in the order of their experts; and how many each expert has."""
    flat = expert.reshape(-1)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return jnp.argsort(flat), counts


def _plus(x: Float[Array, "n o"], bias: Float[Array, "*n o"] | None) -> Float[Array, "n o"]:
    """Float32 outputs with their biases, where there are some."""
    return x if bias is None else x + bias.astype(jnp.float32)


def _by_loop(
    experts: Experts, x: Float[Array, "n w"], expert: Int[Array, "n c"], activation: Activation
) -> Float[Array, "nc w"]:
    """What each choice's expert makes of its token: a turn for every so many tokens of an expert that is touched."""
    (num_tokens, num_choices), num_experts = expert.shape, experts.router.shape[0]
    size = rows_per_turn(num_tokens, num_choices, num_experts)
    order, counts = _in_order(expert, num_experts)
    turns = -(-counts // size)
    ends, first = jnp.cumsum(turns), jnp.cumsum(counts) - counts

    def going(carry: tuple) -> Bool[Array, ""]:
        return carry[0] < ends[-1]

    def turn(carry: tuple) -> tuple:
        i, out = carry
        number = jnp.sum(ends <= i, dtype=jnp.int32)
        done = (i - (ends[number] - turns[number])) * size
        ahead = done + jnp.arange(size, dtype=jnp.int32)
        place = order[jnp.minimum(first[number] + ahead, order.shape[0] - 1)]
        rows = x[place // num_choices]

        def product(weight: Weight, biases: Float[Array, "e o"] | None, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
            return _plus(experts.one(weight, number).matmul(x), None if biases is None else biases[number])

        opening, beside = product(experts.gate, experts.gate_bias, rows), product(experts.up, experts.up_bias, rows)
        made = product(experts.down, experts.down_bias, gated(opening, beside, x.dtype, activation))
        return i + 1, out.at[jnp.where(ahead < counts[number], place, order.shape[0])].set(made, mode="drop")

    out = jnp.zeros((num_tokens * num_choices, x.shape[1]), jnp.float32)
    return jax.lax.while_loop(going, turn, (jnp.int32(0), out))[1]


def rows_per_turn(num_tokens: int, num_choices: int, num_experts: int) -> int:
    """Return how many tokens of an expert one turn of the loop multiplies: about as many as one has, at least two."""
    even = -(-num_tokens * num_choices // num_experts)
    return max(2, min(num_tokens, _MOST, max(_FEWEST, 1 << (even - 1).bit_length())))


def _by_ragged_products(
    experts: Experts, x: Float[Array, "n w"], expert: Int[Array, "n c"], activation: Activation
) -> Float[Array, "nc w"]:
    """What each choice's expert makes of its token: products of all tokens, which are sorted by expert."""
    order, counts = _in_order(expert, experts.router.shape[0])
    rows, of_row = x[order // expert.shape[1]], expert.reshape(-1)[order]

    def product(weight: Weight, biases: Float[Array, "e o"] | None, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        added = None if biases is None else biases.at[of_row].get(mode="clip")
        return _plus(experts.all(weight).matmul_by(x, counts), added)

    opening, beside = product(experts.gate, experts.gate_bias, rows), product(experts.up, experts.up_bias, rows)
    made = product(experts.down, experts.down_bias, gated(opening, beside, x.dtype, activation))
    return jnp.zeros_like(made).at[order].set(made, unique_indices=True)


def _by_every(experts: Experts, x: Float[Array, "n w"], choice: Choice, activation: Activation) -> Float[Array, "n w"]:
    """The weighed sum of what the chosen experts make of each token, by products of every expert with every token."""
    gate, up, down = (_floats(experts.all(matrix)) for matrix in (experts.gate, experts.up, experts.down))
    weight = jnp.sum(choice.weight[..., None] * jax.nn.one_hot(choice.expert, gate.shape[0]), axis=1)

    def opened(matrix: Float[Array, "e f w"], bias: Float[Array, "e f"] | None) -> Float[Array, "n e f"]:
        product = jnp.einsum("nw,efw->nef", x, matrix, preferred_element_type=jnp.float32)
        return product if bias is None else product + bias.astype(jnp.float32)

    opening, beside = opened(gate, experts.gate_bias), opened(up, experts.up_bias)
    hidden = gated(opening, beside, x.dtype, activation) * weight[..., None].astype(x.dtype)
    out = jnp.einsum("nef,ewf->nw", hidden, down, preferred_element_type=jnp.float32)
    return out if experts.down_bias is None else out + weight @ experts.down_bias.astype(jnp.float32)


def _floats(weight: Weight) -> Float[Array, "e o i"]:
    if not isinstance(weight, Dense):
        raise ValueError("experts: got weights in 8 bits, wanted floats where every expert is multiplied")
    return jnp.asarray(weight.array)
