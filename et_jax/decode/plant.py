"""A plant: one model of a decoder, its kernels, its weights, and its cache."""

import dataclasses

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from et_jax.decode import cost
from et_jax.decode.cache.kv import KVCache
from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, expert_bytes, expert_counts, expert_weights, num_multiplied
from et_jax.models.weights import num_bytes
from et_jax.pallas.paged_attention.api import shares_lists, shares_pages
from et_jax.softmax import Softmax
from et_jax.types import pytree, replace

Weights = tuple[ModelWeights, ...]
"""The weights of each plant of a decoder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
    """One model of a decoder, as programs are compiled for it: its shape, the page size, the backend of attention.

    `scores_backend` names the kernels that score blocks. `mesh` has the chips that the model is split over, None for
    one chip (`decode.sharded`).
    """

    model: ModelShape
    page_size: int
    backend: str
    scores_backend: str
    mesh: Mesh | None = None

    @property
    def all_kv_heads(self) -> int:
        """KV heads over all layers."""
        return self.model.num_layers * self.model.num_kv_heads

    def reads_together(self, softmax: Softmax, *, selected: bool) -> bool:
        """Return whether a layer's pages are read once for all rows of a slot, with or without block selection."""
        if selected or softmax.window is not None:  # then the lists of a slot's rows differ
            return shares_lists(self.backend)
        return shares_pages(self.backend, self.model.group_size)


@pytree
class PlantState:
    """The state of one model of a decoder: its cache, with the first `num_cached` tokens of every slot.

    All plants share the page numbers of one page table. The other fields are for cache compression,
    None without it: a token's place in the cache is its position less `shift`, the number of tokens dropped before
    it; `skipped` counts the leading blocks in which a KV head has no entries, None if all heads keep as many;
    `queries` are the last of each sequence, rotated, that of position p at place p mod w (`cache.queries`), None if
    no policy uses them; only tokens computed in the slot, not those of shared pages, have some. `adapter` is the
    number of each slot's adapter, 0 for none; None if the model has no adapters.
    """

    cache: KVCache
    num_cached: Int[Array, " b"]
    shift: Int[Array, " b"] | None = None
    skipped: Int[Array, "b l k"] | None = None
    queries: Float[Array, "b l w h d"] | None = None
    adapter: Int[Array, " b"] | None = None

    def emptied(self, slot: Int[Array, ""]) -> "PlantState":
        """Return the state with an empty cache of a slot, and nothing dropped."""

        def none(x: Array | None) -> Array | None:
            return None if x is None else x.at[slot].set(0)

        num_cached = self.num_cached.at[slot].set(0)
        held = {"shift": self.shift, "skipped": self.skipped, "adapter": self.adapter}
        return replace(self, num_cached=num_cached, **{name: none(x) for name, x in held.items()})


def check_weights(weights: Weights, num_plants: int) -> None:
    """Raise TypeError unless there are weights of every plant of a decoder."""
    if not isinstance(weights, tuple) or len(weights) != num_plants:
        got = f"those of {len(weights)}" if isinstance(weights, tuple) else f"a {type(weights).__name__}"
        raise TypeError(f"weights: got {got}, wanted a tuple with those of each of the decoder's {num_plants} models")


def costs(
    plants: tuple[Plant, ...], weights: Weights, states: tuple[PlantState, ...], by_mass_of: int = 0
) -> tuple[cost.Model, ...]:
    """Return the cost of running each model of a decoder.

    If the last masses of `by_mass_of` query heads per KV head select the first one's blocks, one number of
    each is read, and one written.
    """
    by_mass = (by_mass_of, *[0] * (len(plants) - 1))
    return tuple(_cost(*each) for each in zip(plants, weights, states, by_mass, strict=True))


def _cost(plant: Plant, weights: ModelWeights, state: PlantState, by_mass_of: int) -> cost.Model:
    layer, model = state.cache.layers[0], plant.model
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    unread = 0 if layer.key_codes is None else 4 * model.head_dim  # the mean key: selectors by 8-bit keys read none
    (num_experts, per_token), expert = expert_counts(model), expert_bytes(weights)
    return cost.Model(
        weights=num_bytes(weights) - num_experts * expert,
        block=num_bytes((layer.pages, layer.kv_scales)) // num_blocks,
        summary=num_bytes((layer.summary, layer.key_codes)) // num_blocks + 2 * 4 * by_mass_of - unread,
        num_multiplied=num_multiplied(model) - per_token * expert_weights(model),
        heads=plant.all_kv_heads,
        group_size=model.group_size,
        head_dim=model.head_dim,
        codes=0 if layer.key_codes is None else plant.page_size,
        expert=expert,
        expert_weights=expert_weights(model),
        per_token=per_token,
    )
