"""Kernels that a chip runs for one layer of a model, counted in the compiled text of a program: no chip is needed.

A launch within a loop of XLA takes one to three microseconds of a GPU whatever it does, so where a step is short the
launches of a layer decide its time. A loop or a condition in a layer makes the host wait, for about 100 microseconds. A
TPU launches nothing and has no host in a loop, but starts every operation anew too.
"""

import dataclasses
import re

# Instructions for which nothing is launched.
NO_KERNEL = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
CONTROL = {"while", "conditional"}
OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? (?P<op>[a-z][\w-]*)\(")
LOOP = re.compile(r' while\(.*body=%?(?P<body>[\w.-]+)(?P<counted>.*"known_trip_count":)?')
CALLED = re.compile(r"to_apply=%?([\w.-]+)")
SCOPE = re.compile(r'op_name="([^"]*)"')
LAYER = re.compile(r"/layer_(\d+)(?=/|$)")  # the scope in which `models.transformer.forward` runs a layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """What one layer launches in the loop over layers: `kernels`, of which `control` are loops and conditionals.

    `beside` are launched for every layer too, by loops that XLA or the program has put beside that one: sums over
    layers in a fixed order, for example. `step` are launched once a step, in the loop over steps.
    """

    kernels: int
    control: int = 0
    beside: int = 0
    step: int = 0

    def told(self) -> str:
        """Return the counts for the report."""
        control = f", {self.control} of them loops or conditionals" if self.control else ""
        beside = f", {self.beside} more in a loop beside" if self.beside else ""
        return f"{self.kernels} kernels a layer{control}{beside}, {self.step} a step"

    def faults(self, recorded: int, control: int = 0, step: int | None = None) -> list[str]:
        """Return what is wrong with them, where so many kernels are recorded, and `control` loops and conditionals.

        `step` are those recorded of a step, None where none are.
        """
        found = []
        if self.kernels > recorded:
            found.append(f"a layer launches {self.kernels} kernels, more than the {recorded} recorded")
        if step is not None and self.step > step:
            found.append(f"a step launches {self.step} kernels beside its layers, more than the {step} recorded")
        if self.control > control:
            found.append(f"of a layer's kernels {self.control} are loops or conditionals, for which the host waits")
        return found


def launches(text: str, counted_loops: bool = True) -> Launches | None:
    """Return what a layer launches, in that loop over layers of a compiled program whose layers launch most.

    A loop over layers runs a known number of times, is in no layer itself, and has layers in its body. Where the body
    holds several layers (a pattern that repeats), their launches are divided by their number, and rounded up. None is
    returned for a program in which no loop runs layers. Without `counted_loops` the innermost loop that has layers is
    taken: a text for a TPU says of no loop how often it runs.
    """
    computations = computations_of(text)
    loops = [found for lines in computations.values() for line in lines if (found := LOOP.search(line))]
    loops = [found for found in loops if found["counted"] or not counted_loops]
    outside = {found["body"]: _scope(found.string) for found in loops if not LAYER.search(_scope(found.string))}
    counted = {body: one for body in outside if (one := _of_layer(computations, body)) is not None}
    if not counted:
        return None
    if not counted_loops:
        inner = {body: {at["body"] for line in computations[body] if (at := LOOP.search(line))} for body in counted}
        counted = {body: one for body, one in counted.items() if not inner[body] & counted.keys()}
    most = max(counted, key=lambda body: (counted[body].kernels, counted[body].control))
    others = [body for body, scope in outside.items() if body not in counted and scope == outside[most]]
    beside = sum(len(kernels_of(computations, body)) for body in others)
    alike = sum(outside[body] == outside[most] for body in counted)  # steps of several widths have a loop each
    called = {
        found["body"]: name for name, lines in computations.items() for line in lines if (found := LOOP.search(line))
    }
    step = len(kernels_of(computations, called[most])) - 1 - len(others)
    return dataclasses.replace(counted[most], beside=-(-beside // alike), step=step)


def computations_of(text: str) -> dict[str, list[str]]:
    """Return the lines of instructions of every computation in a compiled text, by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = found.setdefault(line.split("(")[0].removeprefix("ENTRY").strip(" %"), [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def kernels_of(computations: dict[str, list[str]], name: str) -> list[str]:
    """Return the operations of a computation that launch something, those of computations that it calls among them.

    What is started and awaited apart is one launch.
    """
    found = []
    for line in computations.get(name, ()):
        matched = OPERATION.match(line)
        if matched is None:
            continue
        if matched["op"] == "call":
            found += kernels_of(computations, CALLED.findall(line)[-1])
        elif matched["op"] not in NO_KERNEL and not matched["op"].endswith(("-done", "-update")):
            found.append(matched["op"])
    return found


def _of_layer(computations: dict[str, list[str]], body: str) -> Launches | None:
    """What a layer launches in the body of a loop, None where the body runs none."""
    numbers = {number for line in computations.get(body, ()) for number in LAYER.findall(_scope(line))}
    if not numbers:
        return None
    operations = kernels_of(computations, body)
    return Launches(kernels=-(-len(operations) // len(numbers)), control=sum(one in CONTROL for one in operations))


def _scope(line: str) -> str:
    found = SCOPE.search(line)
    return found[1] if found else ""
