"""Engines beside this one: what is refused. The files that llama.cpp reads are those of `unit/models/test_gguf.py`."""

import sys

import pytest

from scripts import measure

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_a_checkout_without_the_package_is_refused(tmp_path, capsys):
    assert measure.main(["peers", "--checkout", str(tmp_path)]) == 2
    assert "which has no et_jax; name a checkout of it." in capsys.readouterr().err


@pytest.mark.parametrize(("python", "said"), [("nowhere", "cannot be run"), (sys.executable, "lacks llama.cpp")])
def test_a_python_without_an_engine_is_refused(python, said, capsys):
    assert measure.main(["peers", "--quick", "--llama-python", python]) == 2
    assert said in capsys.readouterr().err
