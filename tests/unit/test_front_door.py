"""The names of `import et_jax`: each is where the table says, editors see the same, and none costs an import."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import et_jax

SOURCE = Path(et_jax.__file__)


def test_every_name_is_where_the_table_says_and_editors_see_the_same():
    for name, home in et_jax._HOMES.items():
        assert getattr(et_jax, name) is getattr(importlib.import_module(home), name) and name in dir(et_jax)
    [block] = [
        node.body
        for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    lines = {ast.unparse(line) for line in block}
    assert lines == {f"from {home} import {name} as {name}" for name, home in et_jax._HOMES.items()}
    assert SOURCE.with_name("py.typed").is_file()
    for name in ("lode", "jax"):
        with pytest.raises(AttributeError, match=f"module et_jax has no attribute {name}"):
            getattr(et_jax, name)


# Slow to import and not needed by every run.
LAZY = {"IPython", "matplotlib", "orbax", "huggingface_hub", "sentencepiece", "jinja2", "rich", "tokenizers", "jax"}


def test_the_package_alone_loads_no_jax_and_the_command_line_nothing_that_is_slow():
    code = """
import sys, et_jax
assert not {"jax", "numpy"} & sys.modules.keys() and et_jax.UsageError
import et_jax.generate
et_jax.generate.parser()  # for help, and for mistakes in the arguments
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not LAZY & set(done.stdout.split())
