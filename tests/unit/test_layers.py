"""Imports go one way, from the command lines down to `types`, layer by layer. Read, never run."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "et_jax"

# A module imports its own folder and those on lower layers; names of one layer stand side by side.
LAYERS = {
    **dict.fromkeys(("types", "errors", "sums"), 0),
    **dict.fromkeys(("io", "scope", "softmax"), 1),
    **dict.fromkeys(("models", "pallas", "control", "text", "cli"), 2),
    "decode": 3,
    "serve": 4,
    **dict.fromkeys(("batch", "tasks", "report"), 5),
    "training": 6,
    "commands": 7,
    **dict.fromkeys(("generate", "evaluate", "calibrate", "__init__"), 8),
    "harness": 9,
    "__main__": 10,
}
FORBIDDEN = {"torch", "transformers", "hypothesis", "pytest"}  # for golden files and tests alone
# What is decided on the host is plain Python, and imports of the package nothing but what it stands on.
PLAIN = {
    "et_jax.serve.scheduler": set(),
    "et_jax.serve.memory.prefix_cache": set(),
    "et_jax.serve.memory.page_pool": {"et_jax.serve.memory.prefix_cache"},
}
CALLED = ("import_module", "__import__")
NOT_PLAIN = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "numpy"}


def modules() -> dict[str, Path]:
    """Return the file of every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, files: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of every import of a file, at its top and inside its functions.

    A target is a module of the package, or the top-level name of another package, "" where it is relative.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLED:
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        else:
            continue
        for name in names:
            while name.startswith("et_jax.") and name not in files:
                name = name.rpartition(".")[0]
            yield node.lineno, name if name in files else name.split(".")[0]


def folder(module: str) -> str:
    """Return the top-level name that `module` belongs to; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def test_imports_go_one_way_and_in_no_circle():
    files, found = modules(), []
    targets: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        here = folder(module)
        assert here in LAYERS, f"{module} is on no layer; add {here!r} to LAYERS in tests/unit/test_layers.py"
        for line, target in imports(path, files):
            targets[module].add(target)
            if target in files and folder(target) != here and LAYERS.get(folder(target), -1) >= LAYERS[here]:
                why = "which is not on a lower layer"
            elif module in PLAIN and (target in NOT_PLAIN or (target in files and target not in PLAIN[module])):
                why = "but is plain Python and stands alone"
            elif target in FORBIDDEN or not target:
                why = "which the package never does"
            else:
                continue
            found.append(f"{path}:{line}: {module} imports {target or 'something relative'}, {why}")
    assert not found, "\n" + "\n".join(found)
    # raises a CycleError that names the circle
    graphlib.TopologicalSorter({name: each - {name, "et_jax"} for name, each in targets.items()}).prepare()


def test_the_docstring_of_every_folder_names_its_modules():
    for path in (one for folder in ("*", "decode/*", "serve/*") for one in PACKAGE.glob(f"{folder}/__init__.py")):
        named = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""))
        inside = {one.stem for one in path.parent.iterdir() if one.suffix == ".py" or (one / "__init__.py").exists()}
        assert inside - {"__init__"} <= named, f"{path} does not say what is in {sorted(inside - named)}"
