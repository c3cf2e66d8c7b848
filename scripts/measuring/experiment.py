"""What an experiment is: a question, settings, and groups of arms that are measured on the same rows.

It is a file of `scripts/experiments`, whose docstring begins with the question:

    class Settings(Base):
        model: str = model()
        rows: int = setting(16, "rows of text", least=2, quick=2)

    def groups(settings: Settings) -> Iterator[Group]: ...

    FIGURES = {"loss": Figure(header="loss, nats")}

Settings are flags of the command line: `rows` is `--rows`. Each is checked before `groups` is called, which loads the
model. An arm is a function without arguments. Of quality it returns the figures of each row. Of time, in a group with
`rounds`, it returns a function that runs one round and returns that round's figures; the arms of a group take turns.
"""

import argparse
import dataclasses
import functools
import importlib
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from et_jax.errors import UsageError
from et_jax.models.local import local_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of an experiment's table; `against` compares it with the baseline's, row by row.

    "difference" is the arm's mean less the baseline's, "saving" is what the arm's sum is less, as a share of the
    baseline's, and "ratio" is the median of the arm's rows over the baseline's.
    """

    header: str
    against: Literal["difference", "saving", "ratio"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Arms on the same rows, under `labels` that tell the group from others. `baseline` is one of the arms, or None.

    With `rounds` the arms are timed: they take turns for so many rounds, of which each is a row. Of arms that are
    `timed` by themselves each row is a round too; those that were missed are tried again.
    """

    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arms: Mapping[str, Callable[[], Any]]
    baseline: str | None = None
    rounds: int | None = None
    timed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, and how it is answered.

    `plot` names the figures that a picture shows, one over the other, of the groups that have both.
    """

    question: str
    settings: type["Base"]
    groups: Callable[[Any], Iterator[Group]]
    figures: Mapping[str, Figure]
    plot: tuple[str, str] | None = None


def grouped(
    label: str, values: Sequence[Any], names: Iterable[str], arm: Callable[..., Any], baseline: str | None
) -> Iterator[Group]:
    """Yield a group for each value of a label, whose arms are `arm(name, value)`."""
    for value in values:
        arms = {name: functools.partial(arm, name, value) for name in names}
        yield Group(labels={label: value}, arms=arms, baseline=baseline)


class Missed(ValueError):
    """Raised by an arm that cannot be had, with the reason: the table shows it, and the other arms go on."""


def setting(
    default: Any,
    help: str,
    *,
    quick: Any = None,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
    kind: str | None = None,
) -> Any:
    """Return a field of settings: its default and bounds, what `--quick` takes instead, what `--help` says.

    A default of `...` makes the flag required. `kind` is "model", "text" or "checkout" where the value names one.
    """
    facts = {"help": help, "quick": quick, "least": least, "most": most, "choices": choices, "kind": kind}
    return dataclasses.field(default=default, metadata=facts)


def model(default: str = "bundled", quick: str = "bundled-small") -> Any:
    """Return the field of a model: bundled, bundled-small, a Hugging Face folder or a hub name."""
    return setting(default, "a bundled model, a folder or a hub name", kind="model", quick=quick)


def text() -> Any:
    """Return the required field of a text: a tar archive of works, of which the held-out ones count, or a file."""
    return setting(..., "a tar archive of works, or a file of stories", kind="text")


def checkout() -> Any:
    """Return the field of an older version to compare with: its checkout."""
    return setting("", "a checkout of an older version of et_jax; none to leave it out", kind="checkout")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What every experiment can be told. A class that derives from it is a frozen dataclass of more settings."""

    seed: int = setting(0, "of everything random", least=0)

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Raise UsageError, one sentence, for a value that is out of range or names nothing."""
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    def named(self, kind: str) -> dict[str, Any]:
        """Return the settings of a kind by name: models, texts or checkouts."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.metadata["kind"] == kind}


def _check(field: dataclasses.Field, given: Any) -> None:
    flag, facts = flag_of(field), field.metadata
    if given is ...:
        raise UsageError(f"{flag} is required: {facts['help']}.")
    least, most = (facts[end] for end in ("least", "most"))
    for one in given if isinstance(given, tuple) else (given,):
        if facts["kind"] == "checkout" and one and not Path(one, "et_jax/__init__.py").is_file():
            raise UsageError(f"{flag} is {one}, which has no et_jax; name a checkout of it.")
        if facts["kind"] == "text" and not Path(one).is_file():
            raise UsageError(f"{flag} is {one}; name a file that exists.")
        if facts["kind"] == "model" and _is_path(one) and local_model(one) is None:
            raise UsageError(f"{flag} is {one}; name a folder that exists, or a model.")
        if facts["choices"] is not None and one not in facts["choices"]:
            raise UsageError(f"{flag} is {one}; choose one of {', '.join(facts['choices'])}.")
        if isinstance(one, float) and not math.isfinite(one):
            raise UsageError(f"{flag} is {one}; give a finite number.")
        if (least is not None and one < least) or (most is not None and one > most):
            bounds = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
            raise UsageError(f"{flag} is {one}; give {' and '.join(bounds)}.")


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def flag_of(field: dataclasses.Field) -> str:
    """Return the flag of a setting."""
    return f"--{field.name.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser, settings: type[Base]) -> None:
    """Add a flag for every setting, without a default, so that what was given is known."""
    kinds = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kind, several = kinds[field.name], typing.get_origin(kinds[field.name]) is tuple
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        known = "required" if default is ... else f"default {default}"
        how: dict[str, Any] = {"help": f"{field.metadata['help']} ({known})", "default": argparse.SUPPRESS}
        if kind is bool:
            parser.add_argument(flag_of(field), action=argparse.BooleanOptionalAction, **how)
            continue
        one = typing.get_args(kind)[0] if several else kind
        parser.add_argument(flag_of(field), type=one, nargs="+" if several else None, **how)


def settings_of(experiment: Experiment, given: Mapping[str, Any], quick: bool) -> Any:
    """Return the settings that flags give. Raises UsageError for those that cannot be."""
    fields = dataclasses.fields(experiment.settings)
    small = {one.name: one.metadata["quick"] for one in fields if quick and one.metadata["quick"] is not None}
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return experiment.settings(**small | made)


def names() -> list[str]:
    """Return the names of all experiments: files of `scripts/experiments`."""
    folder = Path(__file__).parents[1] / "experiments"
    return sorted(one.stem for one in folder.glob("*.py") if one.stem != "__init__")


def load_experiment(name: str) -> Experiment:
    """Return the experiment of a name. Raises UsageError where there is none."""
    if name not in names():
        raise UsageError(f"There is no experiment {name}; choose one of {', '.join(names())}.")
    found = importlib.import_module(f"scripts.experiments.{name}")
    known = {"question": str(found.__doc__).splitlines()[0], "plot": getattr(found, "PLOT", None)}
    return Experiment(settings=found.Settings, groups=found.groups, figures=found.FIGURES, **known)
