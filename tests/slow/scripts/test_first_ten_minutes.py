"""What the script that follows the README would notice, and what it takes from the README."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from places import ROOT
from scripts_here import script


@pytest.fixture
def minutes():
    return script("first_ten_minutes")


def test_the_steps_are_commands_of_the_readme(minutes, tmp_path):
    steps = minutes.steps(tmp_path, ROOT)
    assert next(steps) == ("clone", f"git clone --quiet '{ROOT}' .")
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    commands = dict(steps)
    assert "-m venv .venv" in commands["set up"] and "pip install ." in commands["set up"]
    assert "-m et_jax.generate" in commands["first run"] and "install" not in commands["first run"]
    assert "--input in.jsonl --output out.jsonl" in commands["batch"]
    law = (tmp_path / "law.py").read_text()
    compile(law, "law.py", "exec")
    assert law.index("model = et_jax.load()") < law.index("Controller(law=") < law.index("control=own")


def test_blocks_end_with_their_section(minutes, tmp_path):
    (tmp_path / "README.md").write_text("## One\ntext\n## Two\n```bash\ntrue\n```\n")
    assert minutes.blocks(tmp_path, "Two", "bash") == ["true"]
    with pytest.raises(minutes.Broken, match="no bash under the heading 'One'"):
        minutes.blocks(tmp_path, "One", "bash")


def test_a_clone_is_what_was_committed_and_a_failing_step_is_named(minutes, tmp_path):
    source, clone = tmp_path / "source", tmp_path / "clone"
    source.mkdir()
    clone.mkdir()
    failing = "## Install\n```bash\necho no such thing >&2; exit 3 && true\n```\n"
    python = "```python\npass\n```\n"
    committed = f"{failing}## Batch files\n```bash\ntrue\n```\n## In Python\n{python}## Laws\n{python}"
    (source / "README.md").write_text(committed)
    name = "git -c user.name=a -c user.email=a@example.org"
    subprocess.run(f"git init -q && git add . && {name} commit -qm one", shell=True, check=True, cwd=source)
    (source / "README.md").write_text("not yet")
    with pytest.raises(minutes.Broken, match=r"The step 'set up' failed: .* ended with code 3: no such thing"):
        minutes.walk(clone, source, dict(os.environ))
    assert (clone / "README.md").read_text() == committed


def test_a_command_that_hangs_is_ended(minutes, tmp_path, monkeypatch):
    monkeypatch.setattr(minutes, "PATIENCE", 2.0)
    with pytest.raises(minutes.Broken, match="took more than 2 seconds"):
        minutes.run("(echo $BASHPID > hangs; exec sleep 60) && true", tmp_path, dict(os.environ))
    process = Path("/proc", (tmp_path / "hangs").read_text().strip(), "cmdline")
    deadline = time.monotonic() + 10.0
    while process.exists() and process.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or not process.read_bytes()  # gone, or dead and not yet collected


ROW, PAGE = json.dumps({"error": None}) + "\n", "<html><a href='https://example.org'>away</a>" + "x" * 4000 + "</html>"


@pytest.mark.parametrize(
    ("step", "out", "files", "came"),
    [
        ("first run", "a\nb\n", {}, "a b"),
        ("report", "", {"report.html": PAGE}, "a page of 4 kB"),
        ("batch", "", {"out.jsonl": ROW * 3}, "3 answers"),
    ],
)
def test_an_outcome_is_reported(minutes, tmp_path, step, out, files, came):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert minutes.outcome(step, out, tmp_path) == came


@pytest.mark.parametrize(
    ("step", "files", "said"),
    [
        ("first run", {}, "no text came out"),
        ("report", {}, "report.html is no page"),
        ("report", {"report.html": ""}, "report.html is no page"),
        ("report", {"report.html": '<html><img src="https://a.org/a.png"></html>'}, "loads from a network"),
        ("report", {"report.html": "<html><script defer src='http://a.org/a.js'></script>"}, "loads from a network"),
        ("batch", {"out.jsonl": ROW * 2}, "2 rows for 3 lines"),
        ("batch", {"out.jsonl": ROW * 2 + '{"error": {"message": "too long"}}'}, "3 rows for 3 lines, .*too long"),
    ],
)
def test_an_outcome_that_the_readme_does_not_promise_is_a_failure(minutes, tmp_path, step, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(minutes.Broken, match=said):
        minutes.outcome(step, " \n", tmp_path)
