"""What the reference has to be told of the package's habits: an extension of griffe, which reads the source for it.

Classes made by `value` and `pytree` are dataclasses. A field of a dataclass stands in the signature, and is shown again
only where it has a docstring. Lines of a docstring that begin with the name of a parameter are a list.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

KINDS = {
    "et_jax.types.value": griffe.ParameterKind.positional_or_keyword,
    "et_jax.types.pytree": griffe.ParameterKind.keyword_only,
}
EXPLAINED = re.compile(r"^(\w+): ", re.MULTILINE)


class Habits(griffe.Extension):
    """Completes what griffe has read of the package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete every class and function of a package."""
        for member in defined(pkg):
            if isinstance(member, griffe.Class):
                complete(member)
            if isinstance(member, griffe.Class | griffe.Function) and member.docstring:
                names = {parameter.name for parameter in member.parameters}
                member.docstring.value = listed(member.docstring.value, names)


def defined(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Yield all that is defined in a module or a class, however deep."""
    for member in list(parent.members.values()):
        if isinstance(member, griffe.Object):
            yield member
            yield from defined(member)


def complete(class_: griffe.Class) -> None:
    """Give a value or a pytree the signature that its fields make; leave out fields that say nothing beyond it."""
    made = kind(class_)
    if made and "__init__" not in class_.members:
        lineage = [*reversed(class_.mro()), class_]
        given = {name: field for parent in lineage if kind(parent) for name, field in fields(parent)}
        parameters = [
            griffe.Parameter(name, annotation=field.annotation, kind=made, default=default(field))
            for name, field in given.items()
        ]
        itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        class_.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(itself, *parameters)))
    if made or "dataclass" in class_.labels:
        for name, field in list(fields(class_, derived=True)):
            if not field.docstring:
                class_.del_member(name)


def kind(class_: griffe.Class) -> griffe.ParameterKind | None:
    """Return how the fields of a class are given, where it is a value or a pytree."""
    return next((KINDS[each.callable_path] for each in class_.decorators if each.callable_path in KINDS), None)


def fields(class_: griffe.Class, derived: bool = False) -> Iterator[tuple[str, griffe.Attribute]]:
    """Yield the fields that a caller gives, and with `derived` those that are worked out of them."""
    for name, member in class_.members.items():
        if not isinstance(member, griffe.Attribute) or not member.annotation or "property" in member.labels:
            continue
        if derived or not str(member.value).startswith("derived("):
            yield name, member


def default(field: griffe.Attribute) -> str | griffe.Expr | None:
    """Return the default of a field, that of a static one too."""
    made = field.value
    if isinstance(made, griffe.ExprCall) and str(made.function) == "static":
        return next((each.value for each in made.arguments if isinstance(each, griffe.ExprKeyword)), None)
    return made


def listed(docstring: str, names: set[str]) -> str:
    """Return a docstring whose paragraphs that explain parameters, line by line, are lists in Markdown."""
    paragraphs = docstring.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        first = EXPLAINED.match(paragraph)
        if first and first[1] in names:
            paragraphs[i] = EXPLAINED.sub(lambda found: f"- `{found[1]}`: ", paragraph)
    return "\n\n".join(paragraphs)
