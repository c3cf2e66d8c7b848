"""Chat templates that hang, fill memory or fail: each ends in its own sentence, and the next one renders."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from et_jax.errors import UsageError
from et_jax.text import chat
from et_jax.text.chat import MAX_STOPS, Template

SAID = [{"role": "user", "content": "Hi"}]
BUSY = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ messages[0].content }}"
HANGS_AT_A = f"{{% if messages[0].content == 'A' %}}{BUSY}{{% endif %}}{ECHO}"


def process_of(template) -> Any:
    return template._worker._process


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ('{{ "a" * 10**10 }}', "too much memory"),
        ('{% for a in range(99999) %}{{ "abcdefghij" * 100 }}{% endfor %}', "more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deep"),
        (r'{{ "\ud800" }}', "half of a surrogate pair"),
        (r'{{ raise_exception("\ud800\n" * 1000) }}', "refuses these messages"),
    ],
)
def test_a_template_that_goes_too_far_is_refused_in_one_sentence(template, words):
    with pytest.raises(UsageError, match=words) as refusal:
        Template(template, {}).render(SAID)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


@pytest.mark.timeout(60)
def test_a_template_that_hangs_is_stopped_and_given_up_after_several_times_in_a_row(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1.0)
    template, hangs = Template(HANGS_AT_A, {}), [{"role": "user", "content": "A"}]
    assert process_of(template) is None  # nothing is started before it is needed
    unbroken = "{{ ('b' * 10**6) in ('a' * 10**6 + 'b' * 10**5) * 200 }}{{ ('a' * 10**6) | wordwrap(1) }}"
    for one, messages in ((Template(unbroken, {}), SAID), (template, hangs)):  # one operation cannot be broken
        with pytest.raises(UsageError, match="took more than 1 s"):
            one.render(messages)
    assert template.render(SAID) == "Hi"
    for _ in range(MAX_STOPS):
        with pytest.raises(UsageError, match="took more than 1 s"):
            template.render(hangs)
        assert process_of(template) is None
    with pytest.raises(UsageError, match="3 times in a row and is not tried again"):
        template.render(SAID)


def test_a_worker_is_used_again_replaced_when_killed_and_not_shared_with_a_copy():
    template = Template(ECHO + "{{ bos_token }}", {"bos_token": "<s>"})
    template.render(SAID)
    process = process_of(template)
    copy = pickle.loads(pickle.dumps(template))
    assert copy.render(SAID) == template.render(SAID) == "Hi<s>"
    assert process_of(template) is process and process_of(copy).pid != process.pid
    process.kill()
    process.wait()
    assert template.render(SAID) == "Hi<s>"


def test_a_worker_is_ended_in_a_thread_that_is_asking_for_its_state():
    """As by the garbage collector, within `process.poll` of the timer that stops a worker."""
    template = Template(ECHO, {})
    template.render(SAID)
    process = process_of(template)
    with process._waitpid_lock:
        ending = threading.Thread(target=template._worker.close, daemon=True)
        ending.start()
        ending.join(20)
    assert not ending.is_alive() and process.wait(20) == -signal.SIGKILL


def test_threads_get_their_own_answers():
    template = Template(ECHO, {})
    contents = [f"{number}" * 50 for number in range(180)]
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda content: template.render([{"role": "user", "content": content}]), contents)
    assert list(answers) == contents


def gone(pid):
    """Return whether a process ends within three seconds, less than a template may take."""
    for _ in range(30):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def program(folder, code):
    """Start `python -c` in a folder whose files have the names of modules, with the worker's pid on its first line."""
    for name in ("jinja2", "json", "types", "struct"):
        (folder / f"{name}.py").write_text("raise SystemExit('taken for a module')")
    opening = (
        "import sys; sys.path.remove('') if '' in sys.path else None\n"
        "from et_jax.text.chat import Template\n"
        f"template = Template({ECHO!r}, {{}})\n"
        "said = [{'role': 'user', 'content': 'Hi'}]\n"
        "template.render(said)\n"
        "print(template._worker._process.pid, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", opening + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc, which is Linux's")
def test_ctrl_c_ends_the_wait_and_not_the_worker(tmp_path):
    code = (
        "import time\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print(template._worker._process.pid, template.render(said), flush=True)\n"
    )
    running = program(tmp_path, code)
    assert running.stdout is not None
    pid = int(running.stdout.readline())
    time.sleep(0.2)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (out, err, running.returncode) == (f"{pid} Hi\n", "", 0)
    assert gone(pid)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc, which is Linux's")
def test_no_worker_outlives_a_process_that_is_killed_amid_a_render(tmp_path):
    code = (
        "import threading, time, os\n"
        f"busy = Template({BUSY!r}, {{}})\n"
        "threading.Thread(target=busy.render, args=(said,), daemon=True).start()\n"
        "time.sleep(1)\nprint(busy._worker._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    out, _ = program(tmp_path, code).communicate(timeout=60)
    pids = out.split()
    assert len(pids) == 2 and all(gone(int(pid)) for pid in pids)
