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
    "evidence": 7,
    **dict.fromkeys(("generate", "evaluate", "__init__"), 8),
    "__main__": 9,
}
NOWHERE = {"torch", "transformers"}
FOR_TESTS = {"hypothesis", "pytest"}  # installed for tests alone
# What is decided on the host is plain Python, and imports of the package nothing but what it stands on.
PLAIN = {
    "et_jax.serve.scheduler": set(),
    "et_jax.serve.prefix_cache": set(),
    "et_jax.serve.page_pool": {"et_jax.serve.prefix_cache"},
}
CALLED = ("import_module", "__import__")
NOT_PLAIN = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "numpy"}


def modules(package: Path) -> dict[str, Path]:
    """Return the file of every module of `package` by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, files: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of everything `module` imports, at its top and inside its functions.

    A target is a module of the package, or the top-level name of another package.
    """

    def named(dotted: str) -> str:
        if dotted.split(".")[0] != module.split(".")[0]:
            return dotted.split(".")[0]
        while dotted not in files and "." in dotted:
            dotted = dotted.rpartition(".")[0]
        return dotted

    for node in ast.walk(ast.parse(files[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLED:
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        else:
            continue
        yield from ((node.lineno, named(name)) for name in names)


def folder(module: str) -> str:
    """Return the top-level name that `module` belongs to; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def circle(targets: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next and the last is the first, or nothing where there are none."""
    try:
        graphlib.TopologicalSorter({name: found - {name, "et_jax"} for name, found in targets.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def faults(package: Path) -> list[str]:
    """Return one sentence for each import that breaks a rule, with its file and line."""
    files = modules(package)
    found, targets = [], {}
    for module, path in files.items():
        here, name = folder(module), path.relative_to(package.parent).as_posix()
        if here not in LAYERS:
            found.append(f"{name} is on no layer; add {here!r} to LAYERS in tests/unit/test_layers.py")
            continue
        for line, target in imports(module, files):
            targets.setdefault(module, set()).add(target)
            where = f"{name}:{line}: {module} imports {target}"
            if target in files:
                there = folder(target)
                if there != here and LAYERS.get(there, -1) >= LAYERS[here]:
                    found.append(f"{where}, which is not on a lower layer; only a lower layer may be imported")
            if not target:
                found.append(f"{where}something relative; the package imports by full names")
            if target in NOWHERE:
                found.append(f"{where}; the package never does, compare with golden files instead")
            if module in PLAIN and (target in NOT_PLAIN or (target in files and target not in PLAIN[module])):
                found.append(f"{where}; {module.rpartition('.')[2]} is plain Python and stands alone")
            if target in FOR_TESTS:
                found.append(f"{where}, which is installed for tests alone")
    turn = [] if found else circle(targets)  # an import that goes up makes one of itself
    if turn:
        found.append(f"{' imports '.join(turn)}, which is a circle; move what they share below them")
    return found


def test_imports_go_one_way():
    found = faults(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_the_docstring_of_every_folder_names_its_modules():
    for path in PACKAGE.glob("*/__init__.py"):
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        inside = {
            one.stem for one in path.parent.iterdir() if one.suffix == ".py" or (one / "__init__.py").exists()
        } - {"__init__"}
        missing = {module for module in inside if not re.search(rf"\b{module}\b", told)}
        assert not missing, f"{path} does not say what is in {sorted(missing)}"
