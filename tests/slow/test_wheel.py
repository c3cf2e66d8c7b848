"""The wheel alone, away from the repository, holds everything and generates text; an older Python is refused."""

import os
import runpy
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT


def run(*command: str | Path, **settings) -> str:
    """Return what `command` printed on standard output; its failure shows both outputs."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a wheel built from the working tree with the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Return the interpreter of a new environment: the wheel in it, its dependencies borrowed from this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    # Named in a .pth file, this environment comes last on the path and its own .pth files (an editable et_jax) are
    # not read.
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return python


def test_the_wheel_holds_every_source_file_and_the_bundled_models(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("et_jax/**/*.py")}
    files = [path.relative_to(ROOT) for path in ROOT.glob("et_jax/models/bundled*/**/*") if path.is_file()]
    bundled = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    for folder in ("et_jax/models/bundled/", "et_jax/models/bundled_small/"):
        suffixes = {Path(name).suffix for name in bundled if name.startswith(folder)}
        assert suffixes >= {".safetensors", ".json", ".md"}
    assert sources | bundled | {"et_jax/py.typed"} <= packed
    assert {name.split("/")[0].partition("-")[0] for name in packed} == {"et_jax"}, "only the package and its metadata"


def test_the_wheel_generates_text(python, tmp_path):
    """In an empty folder, with an empty home, on the CPU, without a network."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    own = {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    elsewhere = {"cwd": tmp_path, "env": kept | own}
    imported = run(python, "-c", "import et_jax; print(et_jax.__file__)", **elsewhere).strip()
    assert Path(imported).is_relative_to(python.parents[1]), f"{imported} is not the wheel's"
    command = ("-m", "et_jax.generate", "--prompt", "It was", "--max-tokens", "8", "--seed", "1")
    assert run(python, *command, **elsewhere).strip()


def test_an_older_python_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    with pytest.raises(SystemExit, match=r"et_jax needs Python 3\.12 or later"):
        runpy.run_path(str(ROOT / "build_backend.py"))
