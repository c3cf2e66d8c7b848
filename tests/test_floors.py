"""Imports go one way, from the doors down to `types`, floor by floor. Read, never run."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "et_jax"

# A module imports its own top-level name and those on lower floors. Rooms share a floor, so none imports another.
FLOORS = {
    **dict.fromkeys(("types", "terminal"), 0),
    "checksums": 0.5,
    "schema": 0.5,  # a landing: what a model folder may say, for the rooms that read one
    "cli": 1,
    **dict.fromkeys(("entropy", "calibration", "sampling", "stop", "pages", "cache", "tokenizer", "cost", "files"), 1),
    **dict.fromkeys(("control", "models", "pallas", "tasks", "scheduler", "prefix", "values", "snapshots"), 1),
    **dict.fromkeys(("selection", "drawing", "metrics", "compilation", "requests", "memory"), 2),
    **dict.fromkeys(("continuation", "plot", "report", "prompts"), 3),
    "paths": 1,
    "attend": 3,
    "state": 4,
    **dict.fromkeys(("slots", "presets", "parts", "tracing", "preflight", "faults"), 5),
    **dict.fromkeys(("decode", "sizing", "queue"), 6),
    "batching": 7,
    "replicas": 8,
    "calls": 9,
    **dict.fromkeys(("engine", "position_loss"), 10),
    "batch": 11,
    **dict.fromkeys(("generate", "evaluate", "training", "__init__"), 12),
    "__main__": 13,
}
NOWHERE = {"torch", "transformers"}
# Slow to import and not needed by every run, so no module that starts with the command line loads them.
LAZY = {"matplotlib", "orbax", "huggingface_hub", "sentencepiece", "jinja2", "rich", "tokenizers"}
STARTS = ("et_jax", "et_jax.generate")
# The scheduler is plain Python on the host.
NOT_IN_SCHEDULER = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


class Import(NamedTuple):
    """One imported name: `target` is a module of the package, or the top-level name of another package."""

    line: int
    target: str
    eager: bool  # runs when the importing module is imported


def modules(package: Path) -> dict[str, Path]:
    """Return the file of every module of `package` by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(nodes: Iterable[ast.AST], eager: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield `nodes` and all below them, and whether importing the module runs it."""
    for node in nodes:
        yield node, eager
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from statements(node.body, False)
            yield from statements(node.orelse, eager)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(ast.iter_child_nodes(node), eager and not deferred)


def imports(module: str, files: dict[str, Path]) -> Iterator[Import]:
    """Yield what `module` imports, at its top and inside its functions."""
    path = files[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def named(dotted: str) -> str:
        if dotted.split(".")[0] != module.split(".")[0]:
            return dotted.split(".")[0]
        while dotted not in files and "." in dotted:
            dotted = dotted.rpartition(".")[0]
        return dotted

    for node, eager in statements([ast.parse(path.read_text(encoding="utf-8"))]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            source = ".".join([*outer, *filter(None, [node.module])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        else:
            continue
        yield from (Import(node.lineno, named(name), eager) for name in names)


def room(module: str) -> str:
    """Return the top-level name that `module` belongs to; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def loaded_at_start(files: dict[str, Path]) -> set[str]:
    """Return the modules that run as soon as the command line or the package is imported."""
    waiting, loaded = [name for name in STARTS if name in files], set()
    while waiting:
        module = waiting.pop()
        if module in files and module not in loaded:
            loaded.add(module)
            waiting += [found.target for found in imports(module, files) if found.eager]
            waiting += [module.rpartition(".")[0]]
    return loaded


def faults(package: Path) -> list[str]:
    """Return one sentence for each import that breaks a rule, with its file and line."""
    files = modules(package)
    early, found = loaded_at_start(files), []
    for module, path in files.items():
        here, name = room(module), path.relative_to(package.parent).as_posix()
        if here not in FLOORS:
            found.append(f"{name} is on no floor; add {here!r} to FLOORS in tests/test_floors.py")
            continue
        for line, target, eager in imports(module, files):
            where = f"{name}:{line}: {module} imports {target}"
            if target in files:
                there = room(target)
                if there != here and FLOORS.get(there, -1) >= FLOORS[here]:
                    found.append(f"{where}, which is not on a lower floor; only a lower floor may be imported")
                if here == "scheduler" and there == "types":
                    found.append(f"{where}; the scheduler is plain Python and stands alone")
            if target in NOWHERE:
                found.append(f"{where}; the package never does, compare with golden files instead")
            if here == "scheduler" and target in NOT_IN_SCHEDULER:
                found.append(f"{where}; the scheduler is plain Python and stands alone")
            if target in LAZY and eager and module in early:
                found.append(f"{where} as soon as the command line starts; import it in the function that needs it")
    return found


def test_imports_go_one_way():
    found = faults(PACKAGE)
    assert not found, "\n" + "\n".join(found)


@pytest.fixture
def house(tmp_path):
    """Return a function that writes a package from sources by path and gives its folder."""

    def build(sources: dict[str, str]) -> Path:
        for path, source in sources.items():
            file = tmp_path / "et_jax" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return tmp_path / "et_jax"

    return build


SOUND = {
    "__init__.py": "import importlib\ndef __getattr__(name):\n    return importlib.import_module('et_jax.engine')\n",
    "types.py": "import jax\n",
    "pages.py": "from et_jax.types import replace\n",
    "tokenizer.py": "def load():\n    import tokenizers\n",
    "scheduler.py": "import heapq\nimport numpy\n",
    "control/__init__.py": "",
    "control/base.py": "from ..types import replace\n",
    "control/clock.py": "from . import base\nfrom .base import Law\n",
    "decode.py": "from et_jax import pages\nimport et_jax.control.clock\n",
    "engine.py": (
        "from typing import TYPE_CHECKING\nfrom et_jax import decode, scheduler\n"
        "if TYPE_CHECKING:\n    import tokenizers\nelse:\n    import jax\n"
    ),
    "generate.py": "from et_jax.engine import load\n",
    "training/loss.py": "",
    "training/corpus.py": "import tokenizers\nfrom et_jax.types import replace\n",
    "__main__.py": "from et_jax.generate import main\n",
}


def test_a_sound_house_has_no_faults(house):
    assert faults(house(SOUND)) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("types.py", "import et_jax.pages\n", "et_jax/types.py:1: et_jax.types imports et_jax.pages"),
        ("pages.py", "from et_jax.control.base import Law\n", "pages.py:1: et_jax.pages imports et_jax.control.base"),
        ("pages.py", "def f():\n    from et_jax import decode\n", "pages.py:2: et_jax.pages imports et_jax.decode"),
        ("pages.py", "def f():\n    if f:\n        from .decode import step\n", "pages.py:3: et_jax.pages imports"),
        ("pages.py", "from et_jax import load\n", "et_jax.pages imports et_jax, which is not on a lower floor"),
        ("pages.py", "import importlib\nimportlib.import_module('et_jax.engine')\n", "imports et_jax.engine"),
        ("pages.py", "if TYPE_CHECKING:\n    if 1:\n        import et_jax.engine\n", "imports et_jax.engine"),
        ("control/clock.py", "from ..pages import reserve\n", "et_jax.control.clock imports et_jax.pages"),
        ("control/__init__.py", "from ..pages import reserve\n", "et_jax.control imports et_jax.pages"),
        ("control/__init__.py", "from .. import decode\n", "et_jax.control imports et_jax.decode"),
        ("decode.py", "from et_jax.engine import load\n", "et_jax.decode imports et_jax.engine"),
        ("engine.py", "from et_jax.training import loss\n", "et_jax.engine imports et_jax.training.loss"),
        ("scheduler.py", "from et_jax.types import UsageError\n", "the scheduler is plain Python"),
        ("scheduler.py", "def f():\n    import jax.numpy as jnp\n", "scheduler.py:2: et_jax.scheduler imports jax;"),
        ("training/corpus.py", "def f():\n    import torch.nn\n", "imports torch; the package never does"),
        ("evaluate.py", "from transformers import AutoModel\n", "imports transformers; the package never does"),
        ("generate.py", "import rich.console\n", "imports rich as soon as the command line starts"),
        ("tokenizer.py", "import tokenizers\n", None),  # nothing that starts early imports it
        (
            "control/__init__.py",
            "try:\n    import orbax.checkpoint\nexcept ImportError:\n    pass\n",
            "imports orbax as",
        ),
        ("__init__.py", "class A:\n    import matplotlib\n", "imports matplotlib as soon as"),
        ("attention.py", "import jax\n", "et_jax/attention.py is on no floor; add 'attention' to FLOORS in tests/"),
        ("kernels/gpu.py", "import jax\n", "et_jax/kernels/gpu.py is on no floor; add 'kernels' to FLOORS in tests/"),
    ],
)
def test_a_fault_is_found_and_told(house, path, source, expected):
    found = faults(house(SOUND | {path: source}))
    assert len(found) == (expected is not None), found
    assert expected is None or expected in found[0]
