"""The command line with a stand-in for the engine: a token in no time, or as long as a test wants."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

QUICK = """
import hashlib, os, runpy, sys, threading, time
from types import SimpleNamespace
from et_jax.serve import completions, engine
sys.argv[0] = "generate"

def busy():  # in a library, where no handler runs
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

class Model:
    metrics = SimpleNamespace(write=lambda path: None)
    def warm_up(self, drafts=True): pass
    def sequences(self, index, request):
        return [SimpleNamespace(prompt=request.prompt, prompt_ids=[1], laws=SimpleNamespace(min_context=None))]
    def stream(self, prompts, params, cancelled):
        texts = [" \\xe9tait", " une", " fois"]
        trace = []
        for i in range(params.max_tokens):
            text = texts[i % 3]
            trace.append(completions.TokenTrace(
                token=i, text=text, entropy=1.0, varentropy=1.0, temperature=1.0, surprisal=1.0,
                blocks_read=1, blocks_held=1, kept_mass=1.0, entropic_time=1.0, cost=1.0, flops=1.0))
            if i: WAIT
            ends = i + 1 == params.max_tokens or cancelled()
            completion = completions.Completion(
                prompt=prompts[0], prompt_tokens=1, index=0, text="".join(row.text for row in trace),
                token_ids=tuple(range(i + 1)), finish_reason="abort" if cancelled() else "length", trace=tuple(trace),
                error=None,
            ) if ends else None
            yield completions.TokenEvent(prompt_index=0, index=0, text=text, trace=trace[-1], completion=completion)
            if ends: return

def load(*_, **__):
    LOAD
    return Model()

engine.load = load
runpy.run_module("et_jax.generate", run_name="__main__", alter_sys=True)
"""


def generating(*arguments: str | bytes, wait: str = "pass", load: str = "pass") -> list[str | bytes]:
    return [sys.executable, "-c", QUICK.replace("WAIT", wait).replace("LOAD", load), *arguments]


def shell(line: str, *arguments: str | bytes, wait: str = "pass", **environment: str) -> tuple[int, bytes, str]:
    """Run a command under redirections that only a shell can make: `line`, in which "$@" is the command."""
    ran = subprocess.run(
        ["bash", "-c", line, "bash", *generating(*arguments, wait=wait)],
        capture_output=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr.decode()


@contextlib.contextmanager
def started(*arguments: str | bytes, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that has said a first word on standard output; it does not outlive the test."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1) in (b" ", b".")
        yield process
    finally:
        process.kill()
        process.communicate()
