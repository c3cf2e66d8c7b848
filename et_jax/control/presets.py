"""Controllers by name: what `--control` and `control="..."` mean, and the knobs of each.

A preset is a dataclass whose fields are its knobs: flags of commands, checks of requests and docs read them from here,
without JAX.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

from et_jax.errors import UsageError
from et_jax.io.knobs import Knob, defaults, knob, knobs
from et_jax.io.values import fill_unset, shown

if TYPE_CHECKING:
    from et_jax.control.controller import Controller

MOST = 2**29
"""Tokens or blocks that a knob may say: sums of a few stay within 32 bits."""

_BIT = math.log(2)


def _count(help: str, unit: str, least: int = 0, usual: str = "") -> Knob:
    wanted = f"from {least or '0 (off)'} to {MOST}"
    return Knob(help=help, unit=unit, kind=int, least=least, most=MOST, wanted=wanted, usual=usual)


_WINDOW = _count("recent tokens always read", "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A controller by `name`, made of the knobs that are its fields; one that is None has its default.

    Raises UsageError, one sentence, for a value that is no number or out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        fill_unset(self)
        unset = defaults(self)
        for name, one in knobs(self).items():
            value = getattr(self, name)
            if value is not unset[name]:
                object.__setattr__(self, name, one.checked(name, value))

    def controller(self) -> "Controller":
        """Return the laws of the preset as one value, which knows it as its `preset`."""
        from et_jax.control.preset_laws import LAWS  # with JAX, which the knobs alone do without

        made = LAWS[self.name](**vars(self))
        object.__setattr__(made, "preset", self)
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Off(Preset):
    """Measures, and changes nothing."""

    name = "off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning(Preset):
    """What the presets have in common that leave blocks of the cache unread, and can hold an entropy.

    `target_entropy` (nats) switches the thermostat on; without it the temperature is the request's. `tolerance` is what
    may be left unread, here theta where the model is certain: the relative change of a head's output that a block must
    promise to be read. `min_blocks` are read at least, and the last `window` tokens always. A sequence of fewer than
    `min_context` tokens reads all, and nothing is scored for it; where the preset is named to `load`, `generate` or
    the command line without it, that is the length measured of the device (`serve.loading.min_context`), else 0.
    """

    target_entropy: float | int | None = knob(
        None,
        Knob(
            help="the entropy that the thermostat holds by temperature",
            unit="nats",
            kind=float,
            least=math.ulp(0.0),
            wanted="above 0 nats",
        ),
    )
    tolerance: float | int = knob(
        0.05,
        Knob(
            help="theta where the model is certain: the relative change of a head's output that a block must promise",
            unit="share",
            kind=float,
            least=0.0,
            wanted="0 or above",
        ),
    )
    min_blocks: int = knob(3, _count("cache blocks that each KV head reads at least", "blocks"))
    window: int = knob(64, _WINDOW)
    min_context: int = knob(
        0,
        _count(
            "a sequence of fewer tokens reads all, and nothing is scored for it; 0 chooses always",
            "tokens",
            usual="the length from which the preset saves time, where that is measured of the device; evaluate: 0",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper(Pruning):
    """Entropic-Time Inference as printed.

    Tail-corrected entropy, blocks with E_b > theta, a floor on the entropy and on the number of blocks, and limits on
    rates. It scores no keys: alpha of E_b is what a block had when it was last read, or what its box promises
    (`view.greater_mass`). docs/evidence.md says which answers that keeps.
    """

    name = "paper"
    window: int = knob(0, _WINDOW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarded(Pruning):
    """The same with exact entropy, sinks and a recent window always read, and a temperature that only cools."""

    name = "guarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified(Pruning):
    """Reads all but a proved share of the attention mass of every head, from 8-bit copies of the keys.

    The rest counts as its mean value. `tolerance` is the share that no head passes; it is less for heads that look at
    few blocks, by the entropy of their attention.
    """

    name = "certified"
    tolerance: float | int = knob(
        0.05,
        Knob(
            help="the share of its attention mass that a head may leave unread",
            unit="share",
            kind=float,
            least=0.0,
            most=1.0,
            wanted="a share of attention, from 0 to 1",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(Pruning):
    """Reads the blocks of greatest expected error, from 8-bit copies of the keys.

    That goes by the model's measured sensitivity to each head, which `et_jax.calibrate` measures. The rest counts
    as its mean value. `tolerance` is an expected error, in nats a token to an order of magnitude.
    """

    name = "adaptive"
    tolerance: float | int = knob(
        1e-4,
        Knob(
            help="the expected error of what is left unread, in nats a token to an order of magnitude",
            unit="nats",
            kind=float,
            least=0.0,
            wanted="0 or above",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ead(Preset):
    """Entropy Adaptive Decoding as printed: of two models the small one speaks where it is certain.

    That is while the mean entropy of the last five predictions is at most `tau`, in nats, by default the paper's 0.25
    bits. It needs a small model.
    """

    name = "ead"
    tau: float | int = knob(
        0.25 * _BIT,
        Knob(
            help="the mean entropy up to which the small model speaks",
            unit="nats",
            kind=float,
            wanted="a number",
            infinite=True,  # one of the models speaks alone
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EadGuarded(Ead):
    """The same with hysteresis, windows of one model's entropies, and a change before the token, not after it."""

    name = "ead_guarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyInfer(Preset):
    """Reads prompts segment by segment, and decodes as "off" does.

    Each KV head reads as many blocks as the entropy of its attention asks for, `prefill_budget` tokens to begin with.
    Segments have a quarter of that, 512 tokens at most, and the first two budgets of a prompt are read densely, as in
    its code.
    """

    name = "entropyinfer"
    prefill_budget: int = knob(
        2048, _count("what a KV head reads of a prompt before a segment, to begin with", "tokens", 1)
    )


PRESETS: dict[str, type[Preset]] = {
    one.name: one for one in (Off, Paper, Guarded, Certified, Adaptive, Ead, EadGuarded, EntropyInfer)
}
"""Every preset by its name."""

NAMES = tuple(PRESETS)

KNOBS = tuple(dict.fromkeys(name for one in PRESETS.values() for name in knobs(one)))
"""The knobs of all of them."""


def preset(name: str, **given: float | int | None) -> "Controller":
    """Return the controller of that name, with those of its knobs that are given; None leaves one at its default.

    `PRESETS` has all of them: their classes say what each does, and the fields of those are its knobs.

    Raises UsageError for an unknown name, a value out of range, or a knob that the named one does not have.
    """
    made = PRESETS.get(name) if isinstance(name, str) else None
    if made is None:
        raise UsageError(f"control is {shown(name)}; choose one of {', '.join(NAMES)}.")
    taken = {key: value for key, value in given.items() if value is not None}
    for key in taken:
        if key not in knobs(made):
            having = ", ".join(one for one in NAMES if key in knobs(PRESETS[one]))
            advice = f"choose one of {having} to set it" if having else "it has none"
            if knobs(made):
                advice = f"it has {', '.join(knobs(made))}"
            raise UsageError(f'control "{name}" has no {key}; {advice}.')
    return made(**taken).controller()
