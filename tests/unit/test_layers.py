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
    **dict.fromkeys(("generate", "evaluate", "__init__"), 7),
    "__main__": 8,
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


# A module and its source, one a line.
SOUND = """
__init__.py | def __getattr__(name): return importlib.import_module('et_jax.serve.engine')
types.py | import jax
control/base.py | from et_jax.types import replace
control/clock.py | from et_jax.control.base import Law
decode/pages.py | from et_jax.types import replace
decode/step.py | from et_jax.decode import pages; import et_jax.control.clock
text/tokenizer.py |
serve/scheduler.py | import heapq
serve/prefix_cache.py |
serve/page_pool.py | from et_jax.serve.prefix_cache import PrefixCache
serve/engine.py | from et_jax.decode import step
generate.py | from et_jax.serve.engine import load
training/loss.py |
"""
# A module, the source that breaks a rule, and the complaint.
WRONG = """
types.py | import et_jax.decode.pages | et_jax/types.py:1: et_jax.types imports et_jax.decode.pages, which is not
control/clock.py | from et_jax.text import tokenizer | imports et_jax.text.tokenizer, which is not on a lower
decode/pages.py | def f(): from et_jax.serve.engine import load | et_jax.decode.pages imports et_jax.serve.engine
decode/pages.py | from et_jax import load | imports et_jax, which is not on a lower layer
decode/pages.py | importlib.import_module('et_jax.serve.engine') | imports et_jax.serve.engine, which is not
decode/pages.py | if TYPE_CHECKING: import et_jax.serve.engine | imports et_jax.serve.engine, which is not
decode/pages.py | from et_jax.decode.step import step | imports et_jax.decode.pages imports et_jax.decode.step
decode/pages.py | from ..serve.engine import load | imports something relative; the package imports by full names
serve/scheduler.py | from et_jax.types import replace | scheduler is plain Python
serve/page_pool.py | def f(): import numpy | page_pool is plain Python
training/loss.py | def f(): import torch.nn | imports torch; the package never does
training/loss.py | import hypothesis | imports hypothesis, which is installed for tests alone
attention.py | import jax | et_jax/attention.py is on no layer; add 'attention' to LAYERS
"""


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def written(folder: Path, sources: dict[str, str]) -> Path:
    """Write a package from sources by path and return its folder."""
    for path, source in sources.items():
        file = folder / "et_jax" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)
    return folder / "et_jax"


def test_each_rule_finds_what_breaks_it_and_nothing_in_a_sound_package(tmp_path):
    sound = dict(rows(SOUND))
    assert faults(written(tmp_path / "sound", sound)) == []
    for number, (path, source, expected) in enumerate(rows(WRONG)):
        found = faults(written(tmp_path / str(number), sound | {path: source}))
        assert len(found) == 1 and expected in found[0], (path, source, found)
