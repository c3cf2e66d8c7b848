"""A chat on a terminal: turns, commands, an answer that is stopped, the end."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from byte_level import byte_level_folder

from et_jax.errors import UsageError
from et_jax.report.conversation import Conversation
from et_jax.serve.engine import load
from et_jax.serve.requests import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A small model with random weights and a chat template."""
    place = byte_level_folder(tmp_path_factory.mktemp("chat"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return place


@pytest.fixture(scope="module")
def model(chatty):
    return load(str(chatty), max_num_seqs=1)


@pytest.fixture
def chat(model):
    return Conversation(model, SamplingParams(max_tokens=4, temperature=0.0), None)


def said(chat, text, cancelled=lambda: False):
    pieces = []
    chat.answer(text, lambda event: pieces.append(event.text), cancelled)
    return "".join(pieces)


def test_a_turn_is_answered_from_all_before_it(chat, model):
    first, second = said(chat, "a b"), said(chat, "c")
    before = f"user: a b\nassistant: {first}\nuser: c\nassistant:"
    [expected] = model.generate([model.tokenizer.backend.encode(before, special=False)], chat.params)
    assert second == expected.text
    assert [one["role"] for one in chat.messages] == ["user", "assistant"] * 2


def test_commands_change_the_chat(chat, tmp_path):
    answer = said(chat, "a")
    chat.command(f"/save {tmp_path / 'a.json'}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    assert json.loads((tmp_path / "a.json").read_text()) == turns
    assert len(chat.command("/trace").splitlines()) == 1 + len(chat.last.trace)
    assert chat.command("/set max_tokens 2") == "max_tokens is 2." and chat.params.max_tokens == 2
    chat.command('/set stop ["x"]')
    assert chat.params.stop == ("x",)
    chat.command("/system short")
    assert chat.system_prompt == "short" and not chat.messages
    said(chat, "b")
    chat.command("/reset")
    assert not chat.messages and chat.system_prompt == "short"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set temperature -1.0", "temperature is -1.0; it must be 0 (greedy) or above."),
        ("/set heat 1", "heat is no setting; choose one of"),
        ("/set temperature", "is no command; /help shows"),
        ("/foo", "/foo is no command; /help shows what there is."),
    ],
)
def test_a_wrong_command_is_refused_and_changes_nothing(chat, line, sentence):
    before = chat.params
    with pytest.raises(UsageError, match=re.escape(sentence)):
        chat.command(line)
    assert chat.params == before


def test_turns_that_do_not_fit_are_refused_and_the_chat_stays(chat, model):
    said(chat, "a")
    before = list(chat.messages)
    with pytest.raises(UsageError, match="shorten the prompt"):
        said(chat, "a " * model.max_model_len)
    assert chat.messages == before


def test_a_stopped_answer_is_kept_as_far_as_it_came(chat):
    chat.command("/set max_tokens 40")
    said(chat, "a", cancelled=lambda: True)
    assert chat.last.finish_reason == "abort" and len(chat.messages) == 2


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "et_jax.generate", "--interactive", *arguments]
        env = {**os.environ, "TERM": "xterm-256color"}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.shown, self.seen = "", 0

    def until(self, words: str, seconds: float = 120.0) -> str:
        """Read until some words have come since the last that were waited for, and return what came with them."""
        end, begin = time.monotonic() + seconds, self.seen
        while (found := self.shown.find(words, begin)) < 0:
            assert time.monotonic() < end and self.process.poll() is None, self.shown
            if select.select([self.ours], [], [], 0.2)[0]:
                self.shown += os.read(self.ours, 4096).decode(errors="replace")
        self.seen = found + len(words)
        return self.shown[begin : self.seen]

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def drop_line(self) -> None:
        """Press Ctrl-C until a new prompt comes: CPython loses a signal between a key and the wait for the next."""
        for _ in range(60):
            os.kill(self.process.pid, signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.until("> ", seconds=2)
                return
        raise AssertionError(self.shown)


def test_a_chat_in_a_terminal_goes_on_after_ctrl_c_and_ends_with_ctrl_d(chatty):
    terminal = Terminal("--model", str(chatty), "--max-tokens", "400", "--max-num-batched-tokens", "16")
    terminal.until("> ")
    terminal.type("/set ignore_eos true\nhello\n")
    terminal.until("\x1b[38;5;")  # a token in the colour of its entropy
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until("> ")
    terminal.type("/reset\n/set max_tokens 1\n")  # the answer may have grown so long that no other turn fits
    terminal.until("max_tokens is 1.")
    terminal.type("again\n/trace\n/set top_k 3\n")
    traced = terminal.until("top_k is 3.").partition("surprisal  token")[2]
    assert len(re.findall(r"\d\.\d{3}  '", traced)) == 1, terminal.shown  # of an answer that no signal has stopped
    terminal.until("> ")
    terminal.type("/foo")
    terminal.until("/foo")
    terminal.drop_line()
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert "Traceback" not in terminal.shown
