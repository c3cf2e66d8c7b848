"""Controllers by name: the meaning of `--control` and `control="..."`, and the knobs of each preset.

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
"""The greatest number of tokens or blocks for a knob: sums of a few stay within 32 bits."""

_BIT = math.log(2)


def _count(help: str, unit: str, least: int = 0, usual: str = "") -> Knob:
    wanted = f"from {least or '0 (off)'} to {MOST}"
    return Knob(help=help, unit=unit, kind=int, least=least, most=MOST, wanted=wanted, usual=usual)


def _positive(help: str, unit: str) -> Knob:
    wanted = "above 0 nats" if unit == "nats" else "above 0"
    return Knob(help=help, unit=unit, kind=float, least=math.ulp(0.0), wanted=wanted)


def _from_zero(help: str, unit: str) -> Knob:
    return Knob(help=help, unit=unit, kind=float, least=0.0, wanted="0 or above")


def _share(help: str, of: str) -> Knob:
    return Knob(help=help, unit="share", kind=float, least=0.0, most=1.0, wanted=f"a share of {of}, from 0 to 1")


_WINDOW = _count("recent tokens always read", "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named controller whose fields are its knobs; None means the default.

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
        """Return the laws of the preset as one value, whose `preset` is this one."""
        from et_jax.control.preset_laws import LAWS  # imports JAX, which the knobs do not need

        made = LAWS[self.name](**vars(self))
        object.__setattr__(made, "preset", self)
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Off(Preset):
    """Measures only; changes nothing."""

    name = "off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning(Preset):
    """The knobs of the presets that leave blocks of the cache unread and can regulate the entropy.

    `target_entropy` (nats) turns the thermostat on; without it the temperature is the request's. `tolerance` is what
    may be left unread, here theta at full certainty: a block is read if it changes a head's output by more than this
    share. At least `min_blocks` are read, and the last `window` tokens always. A sequence of fewer than
    `min_context` tokens uses full attention, and no block is scored for it; if `load`, `generate` or the command line
    get the preset without it, it is the length measured on the device (`serve.loading.min_context`), else 0.
    """

    target_entropy: float | int | None = knob(
        None,
        _positive("the entropy that the thermostat regulates by temperature", "nats"),
    )
    tolerance: float | int = knob(
        0.05,
        _from_zero(
            "theta at full certainty: the relative change of a head's output above which a block is read", "share"
        ),
    )
    min_blocks: int = knob(3, _count("cache blocks that each KV head reads at least", "blocks"))
    window: int = knob(64, _WINDOW)
    min_context: int = knob(
        0,
        _count(
            "a sequence of fewer tokens uses full attention without scoring blocks; 0 selects always",
            "tokens",
            usual="the length from which the preset saves time, if it was measured on the device; evaluate: 0",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper(Pruning):
    """Entropic-Time Inference as printed.

    Tail-corrected entropy, blocks with E_b > theta, a floor on the entropy and on the number of blocks, and limits on
    rates. It scores no keys: alpha of E_b is the block's mass when it was last read, or the bound from its box
    (`view.greater_mass`). docs/evidence.md lists the answers that this keeps.
    """

    name = "paper"
    window: int = knob(0, _WINDOW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarded(Pruning):
    """Like `paper`, with exact entropy, sinks and a recent window always read, and a temperature that only cools."""

    name = "guarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified(Pruning):
    """Reads all but a proved share of the attention mass of every head, from 8-bit copies of the keys.

    The rest counts as its mean value. No head exceeds the share `tolerance`; heads with concentrated attention get
    less, by the entropy of their attention.
    """

    name = "certified"
    tolerance: float | int = knob(
        0.05,
        _share("the share of its attention mass that a head may leave unread", "attention"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(Pruning):
    """Reads the blocks of greatest expected error, from 8-bit copies of the keys.

    It uses the model's sensitivity to each head, which `et_jax.calibrate` measures. The rest counts as its mean value.
    `tolerance` is an expected error, in nats per token to an order of magnitude.
    """

    name = "adaptive"
    tolerance: float | int = knob(
        1e-4,
        _from_zero("the expected error of what is left unread, in nats per token to an order of magnitude", "nats"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Pruning):
    """Reads a fixed share of the blocks: those with the greatest attention mass by their boxes and mean keys.

    The share is 1 - `tolerance`. It scores no key and measures no head; entropy does not change what it reads.
    """

    name = "share"
    tolerance: float | int = knob(
        0.75,
        _share("the share of the blocks that is left unread", "the blocks"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ead(Preset):
    """Entropy Adaptive Decoding as printed: of two models the small one is active while it is certain.

    It is certain while the mean entropy of the last five predictions is at most `tau`, in nats, by default the paper's
    0.25 bits. It requires a small model.
    """

    name = "ead"
    tau: float | int = knob(
        0.25 * _BIT,
        Knob(
            help="the mean entropy up to which the small model is active",
            unit="nats",
            kind=float,
            wanted="a number",
            infinite=True,  # only one of the models is active
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EadGuarded(Ead):
    """Like `ead`, with hysteresis, windows over one model's entropies, and a change before the token, not after it."""

    name = "ead_guarded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyInfer(Preset):
    """Reads prompts in segments under a budget, and decodes as "off" does.

    Each KV head reads as many blocks as the entropy of its attention demands, initially `prefill_budget` tokens.
    Segments have a quarter of that, 512 tokens at most, and the first two budgets of a prompt use full attention, as in
    the paper's code.
    """

    name = "entropyinfer"
    prefill_budget: int = knob(
        2048, _count("the initial budget of tokens that a KV head reads of the prompt before a segment", "tokens", 1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mirostat(Preset):
    """Mirostat's second version: no token is sampled whose surprisal exceeds a cap, which holds a mean surprisal.

    The cap starts at twice `target_surprisal`, by default the authors' 5 bits, and is clipped to one to four times it.
    """

    name = "mirostat"
    target_surprisal: float | int = knob(
        5 * _BIT,
        _positive("the mean surprisal that the cap holds", "nats"),
    )
    mirostat_rate: float | int = knob(0.1, _from_zero("how fast the cap moves", "a number"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(Preset):
    """The dynamic temperature of llama.cpp: it grows with the entropy of the very token.

    It rises from the request's temperature less `dynamic_spread`, for a token of no entropy, to that plus
    `dynamic_spread`, where all tokens are alike, with the power `dynamic_exponent` of the entropy's share of the
    greatest possible one.
    """

    name = "dynamic"
    dynamic_spread: float | int = knob(
        0.5,
        _from_zero("how far the temperature goes from the request's, down and up", "a temperature"),
    )
    dynamic_exponent: float | int = knob(
        1.0,
        _positive("the power of the entropy's share of the greatest possible", "a number"),
    )


PRESETS: dict[str, type[Preset]] = {
    one.name: one
    for one in (Off, Paper, Guarded, Certified, Adaptive, Share, Ead, EadGuarded, EntropyInfer, Mirostat, Dynamic)
}
"""Every preset by its name."""

NAMES = tuple(PRESETS)

KNOBS = tuple(dict.fromkeys(name for one in PRESETS.values() for name in knobs(one)))
"""The union of all presets' knobs."""


def preset(name: str, **given: float | int | None) -> "Controller":
    """Return the controller of that name, with the given knobs; None leaves a knob at its default.

    `PRESETS` maps names to classes, whose docstrings describe the presets and whose fields are their knobs.

    Raises UsageError for an unknown name, a value out of range, or a knob that the preset does not have.
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
