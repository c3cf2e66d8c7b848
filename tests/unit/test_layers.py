"""Imports go one way, from the command lines down to `types`, layer by layer. Read, never run."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
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
# Slow to import and not needed by every run, so no module that starts with the command line loads them.
LAZY = {"IPython", "matplotlib", "orbax", "huggingface_hub", "sentencepiece", "jinja2", "rich", "tokenizers"}
STARTS = ("et_jax", "et_jax.generate")
# What is decided on the host is plain Python, and imports of the package nothing but what it stands on.
PLAIN = {
    "et_jax.serve.scheduler": set(),
    "et_jax.serve.prefix_cache": set(),
    "et_jax.serve.page_pool": {"et_jax.serve.prefix_cache"},
}
NOT_PLAIN = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "numpy"}


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


def folder(module: str) -> str:
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


def circle(files: dict[str, Path]) -> list[str]:
    """Return modules of which each imports the next and the last the first, or nothing where there are none such."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            targets = {found.target for found in imports(module, files)} - {module, "et_jax"}
            for target in sorted(targets & files.keys()):
                if found := search(target, [*path, module]):
                    return found
            done.add(module)
        return []

    return next(filter(None, (search(module, []) for module in files)), [])


def faults(package: Path) -> list[str]:
    """Return one sentence for each import that breaks a rule, with its file and line."""
    files = modules(package)
    early, found = loaded_at_start(files), []
    for module, path in files.items():
        here, name = folder(module), path.relative_to(package.parent).as_posix()
        if here not in LAYERS:
            found.append(f"{name} is on no layer; add {here!r} to LAYERS in tests/test_layers.py")
            continue
        for line, target, eager in imports(module, files):
            where = f"{name}:{line}: {module} imports {target}"
            if target in files:
                there = folder(target)
                if there != here and LAYERS.get(there, -1) >= LAYERS[here]:
                    found.append(f"{where}, which is not on a lower layer; only a lower layer may be imported")
            if target in NOWHERE:
                found.append(f"{where}; the package never does, compare with golden files instead")
            if module in PLAIN and (target in NOT_PLAIN or (target in files and target not in PLAIN[module])):
                found.append(f"{where}; {module.rpartition('.')[2]} is plain Python and stands alone")
            if target in FOR_TESTS:
                found.append(f"{where}, which is installed for tests alone")
            if target in LAZY and eager and module in early:
                found.append(f"{where} as soon as the command line starts; import it in the function that needs it")
    turn = [] if found else circle(files)  # an import that goes up makes one of itself
    if turn:
        found.append(f"{' imports '.join([*turn, turn[0]])}, which is a circle; move what they share below them")
    return found


def test_imports_go_one_way():
    found = faults(PACKAGE)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_a_folder_is_read_from_its_docstring(name):
    told = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    inside = {
        path.stem for path in (PACKAGE / name).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    missing = {module for module in inside - {"__init__"} if not re.search(rf"\b{module}\b", told)}
    assert not missing, f"et_jax/{name}/__init__.py does not say what is in {sorted(missing)}"


@pytest.fixture
def package(tmp_path):
    """Return a function that writes a package from sources by path and gives its folder."""

    def build(sources: dict[str, str]) -> Path:
        for path, source in sources.items():
            file = tmp_path / "et_jax" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return tmp_path / "et_jax"

    return build


SOUND = {
    "__init__.py": (
        "import importlib\ndef __getattr__(name):\n    return importlib.import_module('et_jax.serve.engine')\n"
    ),
    "types.py": "import jax\n",
    "errors.py": "",
    "text/__init__.py": "",
    "text/tokenizer.py": "def load():\n    import tokenizers\n",
    "control/__init__.py": "",
    "control/base.py": "from ..types import replace\n",
    "control/clock.py": "from . import base\nfrom .base import Law\n",
    "decode/__init__.py": "",
    "decode/pages.py": "from et_jax.types import replace\n",
    "decode/step.py": "from et_jax.decode import pages\nimport et_jax.control.clock\n",
    "serve/__init__.py": "",
    "serve/scheduler.py": "import heapq\n",
    "serve/prefix_cache.py": "",
    "serve/page_pool.py": "from et_jax.serve.prefix_cache import PrefixCache\n",
    "serve/engine.py": (
        "from typing import TYPE_CHECKING\nfrom et_jax.decode import step\nfrom et_jax.serve import scheduler\n"
        "if TYPE_CHECKING:\n    import tokenizers\nelse:\n    import jax\n"
    ),
    "generate.py": "from et_jax.serve.engine import load\n",
    "training/loss.py": "",
    "training/corpus.py": "import tokenizers\nfrom et_jax.types import replace\n",
    "__main__.py": "from et_jax.generate import main\n",
}


def test_a_sound_package_has_no_faults(package):
    assert faults(package(SOUND)) == []


PAGES, STEP = "decode/pages.py", "decode/step.py"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("types.py", "import et_jax.decode.pages\n", "et_jax/types.py:1: et_jax.types imports et_jax.decode.pages"),
        (
            "control/clock.py",
            "from et_jax.models import config\n",
            "control/clock.py:1: et_jax.control.clock imports et",
        ),
        (
            PAGES,
            "def f():\n    from et_jax.serve import engine\n",
            "pages.py:2: et_jax.decode.pages imports et_jax.serve",
        ),
        (
            PAGES,
            "def f():\n    if f:\n        from ..serve.engine import load\n",
            "pages.py:3: et_jax.decode.pages imp",
        ),
        (PAGES, "from et_jax import load\n", "et_jax.decode.pages imports et_jax, which is not on a lower layer"),
        (PAGES, "import importlib\nimportlib.import_module('et_jax.serve.engine')\n", "imports et_jax.serve.engine"),
        (PAGES, "if TYPE_CHECKING:\n    if 1:\n        import et_jax.serve.engine\n", "imports et_jax.serve.engine"),
        (PAGES, "from .step import step\n", "imports et_jax.decode.step, which is a circle"),
        ("control/__init__.py", "from ..text import tokenizer\n", "et_jax.control imports et_jax.text.tokenizer"),
        ("serve/engine.py", "from et_jax.training import loss\n", "et_jax.serve.engine imports et_jax.training.loss"),
        ("serve/scheduler.py", "from et_jax.types import replace\n", "scheduler is plain Python"),
        ("serve/page_pool.py", "import numpy\n", "page_pool is plain Python"),
        ("serve/scheduler.py", "def f():\n    import jax.numpy as jnp\n", "py:2: et_jax.serve.scheduler imports jax;"),
        ("training/corpus.py", "def f():\n    import torch.nn\n", "imports torch; the package never does"),
        ("evaluate.py", "from transformers import AutoModel\n", "imports transformers; the package never does"),
        ("generate.py", "import rich.console\n", "imports rich as soon as the command line starts"),
        ("text/tokenizer.py", "import tokenizers\n", None),  # nothing that starts early imports it
        ("__init__.py", "try:\n    import orbax.checkpoint\nexcept ImportError:\n    pass\n", "imports orbax as"),
        ("__init__.py", "class A:\n    import matplotlib\n", "imports matplotlib as soon as"),
        ("training/loss.py", "import et_jax.generate\n", "et_jax.training.loss imports et_jax.generate, which is"),
        ("text/tokenizer.py", "from et_jax.training import loss\n", "imports et_jax.training.loss, which is not on"),
        ("training/loss.py", "import hypothesis\n", "imports hypothesis, which is installed for tests alone"),
        ("attention.py", "import jax\n", "et_jax/attention.py is on no layer; add 'attention' to LAYERS in tests/"),
        ("kernels/gpu.py", "import jax\n", "et_jax/kernels/gpu.py is on no layer; add 'kernels' to LAYERS in tests/"),
    ],
)
def test_a_fault_is_found_and_told(package, path, source, expected):
    found = faults(package(SOUND | {path: source}))
    assert len(found) == (expected is not None), found
    assert expected is None or expected in found[0]
