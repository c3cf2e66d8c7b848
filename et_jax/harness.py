"""et_jax as a model of lm-evaluation-harness: its command line, which knows `--model et_jax` here.

    python -m et_jax.harness run --model et_jax --model_args model=smollm2 --tasks arc_easy --limit 20

`--model_args` are `load`'s: `model=smollm2,dtype=float32,control=certified`. Needs `pip install 'et_jax[eval]'`.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

if importlib.util.find_spec("lm_eval") is None:
    print("error: et_jax.harness needs lm_eval; install it with: pip install 'et_jax[eval]'.", file=sys.stderr)
    raise SystemExit(2)

import jax
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import et_jax
from et_jax.cli.command import USAGE
from et_jax.errors import UsageError
from et_jax.scope import platform
from et_jax.serve.requests import GenerationRequest, SamplingParams

_MOST_GENERATED = 256  # tokens of an answer, unless the task says another number
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"n", "stop", "max_tokens", "logprobs"}
_PARTS = 64  # texts that are scored per call
_ASSUMED = "cuda:0"  # the device that the harness's command line passes if none is asked for
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}  # of JAX, by the name of a device


class Rendered(str):
    """A text that begins as the chat template opens a conversation; so does its beginning, and its continuation."""

    is_rendered = True  # the harness's cache of requests may restore a copy of this class

    def __add__(self, other: str) -> "Rendered":
        return Rendered(str.__add__(self, other))

    def __getitem__(self, key: Any) -> str:
        part = str.__getitem__(self, key)
        return Rendered(part) if isinstance(key, slice) and not key.start else part


class Harness(TemplateLM):
    """A model that `et_jax.load` loads, as the harness asks it: log-probabilities and answers.

    Log-probabilities are those of dense attention. Answers are generated under the model's own control. `device` is
    that of `start`.
    """

    def __init__(self, model: str = "bundled", batch_size: int | str = 8, device: str | None = None, **settings: Any):
        super().__init__()
        start(device)
        size = int(batch_size) if str(batch_size).isdecimal() else 8  # "auto" is a number that others search for
        self.model = et_jax.load(model, **{"max_num_seqs": size} | settings)
        self.tokenizer = self.model.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, which also stands before a text with nothing before it."""
        opening = self.tokenizer.bos_id
        if opening is None and not self.tokenizer.eos_ids:
            raise UsageError(f"{self.model.name} has no token that begins or ends a text; the harness needs one.")
        return self.tokenizer.eos_ids[0] if opening is None else opening

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which the harness keeps requests apart."""
        return self.model.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Return the ids of a text; with the token before every text, unless the chat template wrote this one."""
        special = not getattr(string, "is_rendered", False) if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string) if special else self.tokenizer.backend.encode(string, special=False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's template writes it; without the prompt, its last message stays open."""
        if add_generation_prompt:
            return Rendered(self.tokenizer.render(chat_history))
        *before, last = chat_history
        return Rendered(self.tokenizer.render(before) + last["content"])

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of every continuation, and whether greedy decoding gives it.

        Continuations of the same context share its prefill.
        """
        found: list[tuple[float, bool] | None] = [None] * len(requests)
        single: list[tuple[int, list[int], int]] = []
        for context, indices in _by_context(requests, self.model.max_model_len):
            if len(indices) == 1:
                [(index, rest)] = indices
                single.append((index, [*context, *rest], len(rest)))
                continue
            scores = self.model.score([tuple(rest) for _, rest in indices], prefix=context)
            for (index, _), score in zip(indices, scores, strict=True):
                found[index] = score.log_prob, bool(score.greedy.all())
        for begin in range(0, len(single), _PARTS):
            part = single[begin : begin + _PARTS]
            for (index, _, count), score in zip(
                part, self.model.score([tuple(ids) for _, ids, _ in part]), strict=True
            ):
                found[index] = float(score.log_probs[-count:].sum()), bool(score.greedy[-count:].all())
        for (asked, *_), answer in zip(requests, found, strict=True):
            if asked is not None:  # None is a window of a long text
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return [one for one in found if one is not None]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of full texts; long texts are read window by window."""
        sums = []
        for request in requests:
            [text] = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.eot_token_id, self.model.max_model_len - 1, 1)
            parts = [(None, *map(list, make_disjoint_window(one))) for one in windows]
            sums.append(sum(total for total, _ in self._loglikelihood_tokens(parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to every context, up to one of its stop strings; greedily, unless it asks to sample."""
        asked = [self._request(*request.args) for request in requests]
        found = self.model.generate(asked, progress=not disable_tqdm) if asked else []
        answers = [one.checked().text for one in found]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _request(self, context: str, how: dict[str, Any]) -> GenerationRequest:
        until = how.get("until") or []
        stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        given = {name: how[name] for name in _SAMPLING if how.get(name) is not None}
        if not how.get("do_sample", given.get("temperature", 0.0) > 0):
            given["temperature"] = 0.0
        most = how.get("max_gen_toks", how.get("max_tokens", _MOST_GENERATED))
        room = self.model.max_model_len - most
        if room < 1:
            raise UsageError(f"max_gen_toks is {most}; {self.model.name} holds {most + room} with the prompt.")
        prompt = tuple(self.tok_encode(context)[-room:])
        return GenerationRequest(prompt=prompt, params=SamplingParams(max_tokens=most, stop=stop, **given))


register_model("et_jax")(Harness)


def start(device: str | None) -> None:
    """Let JAX start on a device, "cpu", "cuda", "gpu" or "tpu"; on its own choice for None and the harness's default.

    Raises UsageError for another name or number, and if JAX does not have the device or runs on another.
    """
    if device in (None, _ASSUMED):
        return
    kind, _, number = str(device).partition(":")
    if kind not in _PLATFORMS or number not in ("", "0"):
        raise UsageError(f"device is {device}; it must be cpu, cuda, gpu or tpu, of which the first is used.")
    named = {"cpu": "cpu", "gpu": "cuda,cpu"}.get(kind, f"{kind},cpu")
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", named)  # has no effect once JAX runs
    try:
        found = platform()
    except UsageError:
        found = None
    if found != _PLATFORMS[kind]:
        jax.config.update("jax_platforms", before)
        raise UsageError(
            f"device is {device} and JAX runs on {platform()}; leave it out, or start JAX with JAX_PLATFORMS={named}."
        )


def _by_context(
    requests: Iterable[tuple[Any, list[int], list[int]]], most: int
) -> Iterator[tuple[list[int], list[tuple[int, list[int]]]]]:
    """Yield every context with the numbers and ids of its continuations; a long context loses its first tokens."""
    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for index, (_, context, rest) in enumerate(requests):
        if not rest:  # it merged with the last token before it
            context, rest = context[:-1], context[-1:]
        kept = context[-max(1, most - len(rest)) :]
        groups.setdefault(tuple(kept), []).append((index, rest[-(most - 1) :]))
    for context, indices in groups.items():
        yield list(context), indices


def main() -> int:
    """Run the harness's command line, and return the exit code."""
    try:
        cli_evaluate()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
