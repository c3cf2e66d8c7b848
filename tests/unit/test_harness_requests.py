"""What lm-evaluation-harness asks of et_jax: texts with and without the chat template, and a device."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from places import ROOT
from stand_in import completion

pytest.importorskip("lm_eval")

import dill
from lm_eval.api.instance import Instance

import et_jax
from et_jax.errors import UsageError
from et_jax.harness import Harness


class Letters:
    """A tokenizer whose ids are code points, after 0; its template begins with "<"."""

    bos_id, eos_ids = 0, (0,)
    backend = SimpleNamespace(encode=lambda text, special: list(map(ord, text)))

    def encode(self, text: str) -> list[int]:
        return [0, *map(ord, text)]

    def render(self, messages: list[dict[str, str]]) -> str:
        return "<" + "".join(f"{one['role']}: {one['content']} " for one in messages)


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    model = SimpleNamespace(name="letters", tokenizer=Letters(), max_model_len=99)
    model.generate = lambda asked, progress: [completion("", "".join(map(chr, one.prompt))) for one in asked]
    monkeypatch.setattr(et_jax, "load", lambda *_, **__: model)


def test_a_text_has_the_opening_token_unless_the_template_wrote_it(monkeypatch):
    harness, hello = Harness(), [{"role": "user", "content": "Hi"}]
    monkeypatch.setattr(harness, "_loglikelihood_tokens", lambda requests, **_: [one[1:] for one in requests])
    for _ in range(2):  # whatever was asked before
        rendered = harness.apply_chat_template(hello)
        opened = harness.apply_chat_template(
            [*hello, {"role": "assistant", "content": "I"}], add_generation_prompt=False
        )
        contexts = [rendered, "Hi", opened, dill.loads(dill.dumps(rendered))]  # the last of the harness's own cache
        ids = [list(map(ord, one)) for one in contexts]
        ids[1] = [0, *ids[1]]
        pairs = [Instance("loglikelihood", {}, (one, " x"), 0) for one in contexts]
        both = [before + after for before, after in harness.loglikelihood(pairs, disable_tqdm=True)]
        assert both == [[*one, ord(" "), ord("x")] for one in ids]
        answers = harness.generate_until(
            [Instance("generate_until", {}, (one, {"max_gen_toks": 9}), 0) for one in contexts]
        )
        assert answers == ["".join(map(chr, one)) for one in ids]


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", "cuda:0"])  # the last is the default of the command line
def test_a_device_that_jax_runs_on_is_used(device):
    assert Harness(device=device).model.name == "letters"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "device is cuda and JAX runs on cpu; leave it out"),
        ("tpu:0", "device is tpu:0 and JAX runs on cpu; leave it out"),
        ("mps", "device is mps; it must be cpu, cuda, gpu or tpu"),
        ("cuda:1", "device is cuda:1; it must be"),
    ],
)
def test_another_device_is_refused(device, words):
    before = jax.config.jax_platforms
    with pytest.raises(UsageError, match=words):
        Harness(device=device)
    assert jax.config.jax_platforms == before


def test_jax_starts_on_the_device_that_is_asked_for():
    code = (
        "import types, et_jax, jax\nfrom et_jax.harness import Harness\n"
        "et_jax.load = lambda *_, **__: types.SimpleNamespace(tokenizer=None)\n"
        "Harness(device='cpu')\nprint(jax.default_backend())"
    )
    environment = os.environ | {"JAX_PLATFORMS": "tpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "cpu\n", done.stderr
