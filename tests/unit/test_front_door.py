"""The names of `import et_jax`: each is where the table says, editors are told the same, and none costs an import."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import et_jax

SOURCE = Path(et_jax.__file__)


def told_to_checkers() -> dict[str, str]:
    """Return the module of every name that the block for type checkers imports, each under its own name."""
    found = {}
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom), ast.unparse(line)
                assert all(alias.asname == alias.name for alias in line.names), ast.unparse(line)
                found |= {alias.name: line.module for alias in line.names}
    return found


@pytest.mark.parametrize("name", et_jax.__all__)
def test_a_name_is_its_home_s_own(name):
    assert getattr(et_jax, name) is getattr(importlib.import_module(et_jax._HOMES[name]), name)
    assert name in dir(et_jax)


def test_editors_are_told_what_the_table_says():
    assert told_to_checkers() == et_jax._HOMES
    assert SOURCE.with_name("py.typed").is_file()


@pytest.mark.parametrize("name", ["lode", "jax"])
def test_a_name_that_is_not_there_is_refused(name):
    with pytest.raises(AttributeError, match=f"module et_jax has no attribute {name}"):
        getattr(et_jax, name)


def test_the_package_alone_loads_no_jax():
    code = "import sys, et_jax; print(sorted({'jax', 'numpy'} & sys.modules.keys()), et_jax.UsageError.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "UsageError"]
