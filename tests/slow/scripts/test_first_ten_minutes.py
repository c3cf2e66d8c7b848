"""What the script that walks through the first ten minutes would notice, and what it takes from the README."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from scripts_here import SCRIPTS, script


@pytest.fixture
def minutes():
    return script("first_ten_minutes")


@pytest.fixture
def place(minutes, tmp_path):
    """Return a place whose clone holds the README alone."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "README.md").write_text((SCRIPTS.parent / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    return minutes.Place(repository=tmp_path / "repository", clone=clone, environment=dict(os.environ))


def test_the_commands_are_the_readme_s(minutes, place):
    commands, first = minutes.installation(place)
    assert "-m venv .venv" in commands and "pip install ." in commands
    assert "-m et_jax.generate" in first and "install" not in first
    assert "--input in.jsonl --output out.jsonl" in place.blocks("Batch files", "bash")[0]


def test_the_law_is_a_program_of_the_readme_s(minutes, place, monkeypatch):
    written = {}

    def run(self, command, folder=None):
        written[command] = (place.clone / "law.py").read_text(encoding="utf-8")
        return "A first text\nThe text of the law\n"

    monkeypatch.setattr(minutes.Place, "run", run)
    assert minutes.law(place) == "The text of the law"
    [source] = written.values()
    compile(source, "law.py", "exec")
    assert source.index("model = et_jax.load()") < source.index("Controller(law=") < source.index("control=own")


def test_a_heading_that_has_gone_is_told(minutes, place):
    with pytest.raises(minutes.Broken, match="no bash under the heading 'Setting up'"):
        place.blocks("Setting up", "bash")


def test_blocks_end_with_their_section(minutes, place):
    (place.clone / "README.md").write_text("## One\ntext\n## Two\n```bash\ntrue\n```\n")
    assert place.blocks("Two", "bash") == ["true\n"]
    with pytest.raises(minutes.Broken):
        place.blocks("One", "bash")


def test_a_clone_is_what_was_committed(minutes, place):
    source = place.repository
    source.mkdir()
    (source / "README.md").write_text("committed")
    name = "git -c user.name=a -c user.email=a@example.org"
    subprocess.run(f"git init -q && git add . && {name} commit -qm one", shell=True, check=True, cwd=source)
    (source / "README.md").write_text("not yet")
    (place.clone / "README.md").unlink()
    assert minutes.clone(place).startswith("commit ")
    assert (place.clone / "README.md").read_text() == "committed"


def test_a_step_that_fails_ends_the_walk_by_name(minutes, place):
    ran = []
    steps = {
        "one": lambda place: ran.append("one") or "done",
        "two": lambda place: place.run("echo no such thing >&2; exit 3"),
        "three": lambda place: ran.append("three") or "done",
    }
    with pytest.raises(minutes.Broken, match=r"The step 'two' failed: .* ended with code 3: no such thing"):
        minutes.walked(steps, place)
    assert ran == ["one"]


def test_every_step_is_timed(minutes, place):
    rows = minutes.walked({"wait": lambda place: place.run("sleep 0.3; echo there").strip()}, place)
    [row] = rows
    assert (row["step"], row["came_out"]) == ("wait", "there")
    assert 0.3 <= row["seconds"] < 30.0


def test_a_command_that_hangs_is_ended(minutes, place, monkeypatch):
    monkeypatch.setattr(minutes, "PATIENCE", 2.0)
    with pytest.raises(minutes.Broken, match="took more than 2 seconds"):
        place.run("(echo $BASHPID > hangs; exec sleep 60) && true")
    process = Path("/proc", (place.clone / "hangs").read_text().strip(), "cmdline")
    deadline = time.monotonic() + 10.0
    while process.exists() and process.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or not process.read_bytes()  # gone, or dead and not yet collected


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "report.html is no page"),
        ("", "report.html is no page"),
        ('<html><img src="https://example.org/a.png"></html>', "loads from a network"),
        ("<html><script defer src='http://example.org/a.js'></script></html>", "loads from a network"),
    ],
)
def test_a_report_is_a_page_that_stands_alone(minutes, tmp_path, written, said):
    path = tmp_path / "report.html"
    if written is not None:
        path.write_text(written)
    with pytest.raises(minutes.Broken, match=said):
        minutes.page(path)


def test_a_report_may_link_away(minutes, tmp_path):
    path = tmp_path / "report.html"
    path.write_text('<html><a href="https://example.org">away</a>' + "x" * 4000 + "</html>")
    assert minutes.page(path) == "a page of 4 kB"


@pytest.mark.parametrize("rows", [[None, None], [None, None, {"message": "too long"}]])
def test_a_line_without_an_answer_is_told(minutes, tmp_path, rows):
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"error": error}) + "\n" for error in rows))
    with pytest.raises(minutes.Broken, match=f"{len(rows)} rows for 3 lines"):
        minutes.answered(path)


def test_no_text_is_told(minutes):
    with pytest.raises(minutes.Broken, match="no text came out"):
        minutes.line(" \n")
    assert minutes.line("a\nb " + "c" * 100) == "a b " + "c" * 53 + "..."


def test_a_failure_is_the_exit_code(minutes, monkeypatch, tmp_path):
    def fails(place):
        raise minutes.Broken("it rains")

    monkeypatch.setattr(minutes, "STEPS", {"walk": fails})
    monkeypatch.setattr("sys.argv", ["first_ten_minutes.py", "--output", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="The step 'walk' failed: it rains"):
        minutes.main()
    assert not (tmp_path / "out.json").exists()


def test_the_results_are_written_and_shown(minutes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(minutes, "STEPS", {"walk": lambda place: "a mile", "rest": lambda place: "none"})
    monkeypatch.setattr("sys.argv", ["first_ten_minutes.py", "--output", str(tmp_path / "out.json")])
    minutes.main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["came_out"] for row in written["steps"]] == ["a mile", "none"]
    assert written["total_seconds"] == sum(row["seconds"] for row in written["steps"])
    assert "| walk | 0 | a mile |" in capsys.readouterr().out
