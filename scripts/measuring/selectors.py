"""Selectors and controllers that several experiments share."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from et_jax.control import refresh, select, tolerance
from et_jax.control.base import Law, chain
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.selector import AnySelector
from et_jax.control.view import BlockView, needing
from et_jax.types import replace


def quest(view: BlockView) -> Bool[Array, " n"]:
    """Return Quest's blocks, a share `tolerance` of all."""
    count = view.tolerance * jnp.sum(view.num_tokens > 0, dtype=jnp.float32)
    return select.Quest(jnp.round(count).astype(jnp.int32))(view)


def window(view: BlockView) -> Bool[Array, " n"]:
    """Return the first tokens and the last, a share `tolerance` of all (StreamingLLM)."""
    return select.SinksWindow(16, jnp.round(view.tolerance * view.length.astype(jnp.float32)).astype(jnp.int32))(view)


@needing("masses")
def true_mass(view: BlockView) -> Bool[Array, " n"]:
    """Return the fewest blocks that leave at most the tolerance of the last masses: of the true ones, if those are set.

    Of `TeacherForced.true_masses` as the control state's `block_mass`, they are the dense model's at this very token.
    """
    assert view.last_mass is not None
    return select.fewest(view, jnp.where(view.num_tokens > 0, view.last_mass, 0.0))


def guarded(selector: AnySelector, residual: bool = False) -> Controller:
    """Return a controller that reads what a selector opens, the first block and the newest."""
    return Controller(selector=select.Guarded(selector, sinks=1, window=1, min_blocks=0), residual=residual)


def reading(selector: AnySelector, share: float, *laws: Law) -> Controller:
    """Return `guarded` of a selector that reads a share of the blocks, with more laws."""
    return replace(guarded(selector), law=chain(Controller.law, tolerance.Constant(share), *laws))


def keeping(controller: Controller, interval: int) -> Controller:
    """Return a controller that selects blocks at every so many tokens, and reads the last selection at the others."""
    return replace(controller, law=chain(controller.law, refresh.Every(interval)), residual=False)


COMPARED: dict[str, Controller] = {
    **{name: preset(name) for name in ("off", "paper", "guarded")},
    **{f"certified {at:g}": preset("certified", tolerance=at) for at in (0.05, 0.2, 0.5)},
    **{f"adaptive {at:g}": preset("adaptive", tolerance=at) for at in (1e-4, 1e-3)},
    "adaptive 0.0001, every 8th token": keeping(preset("adaptive", tolerance=1e-4), 8),
    **{f"share {at:g}": preset("share", tolerance=1 - at) for at in (0.25, 0.125)},
    "quest": reading(quest, 0.125),
    "sinks and window": reading(window, 0.125),
}
"""Presets at a tolerance, and two selectors that read an eighth of the blocks; all but `off` select at every length."""
