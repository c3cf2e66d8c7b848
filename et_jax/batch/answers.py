"""The rows of the output: OpenAI's completion bodies, with totals of entropy and cost beside the usage."""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from et_jax.batch.tasks import Entry, Task
from et_jax.serve.completions import Completion, TokenTrace, entropic
from et_jax.serve.scoring import Score

_LEAST_LOGPROB = -9999.0  # OpenAI's number for a token that cannot be sampled; JSON has no infinity


@runtime_checkable
class Spelling(Protocol):
    """The part of a tokenizer that answers require."""

    def decode(self, ids: Sequence[int]) -> str: ...


def answer_row(task: Task, completions: Sequence[Completion], model: str, tokenizer: Spelling) -> dict[str, Any]:
    """Return the row of a line whose continuations all ended without an error."""
    entry = task.entry
    ordered = sorted(completions, key=lambda completion: completion.index)
    prompt_tokens, completion_tokens = ordered[0].prompt_tokens, sum(len(c.token_ids) for c in ordered)
    name = entry.id.removeprefix("batch_req_")
    body = {
        "id": f"{'chatcmpl' if task.chat else 'cmpl'}-{name}",
        "object": "chat.completion" if task.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(task, completion, tokenizer) for completion in ordered],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "entropic": entropic(ordered),
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": entry.id, "custom_id": entry.custom_id, "response": response, "error": None}


def error_row(entry: Entry, code: str, message: str) -> dict[str, Any]:
    """Return the row of a line without an answer; `code` is "invalid_request" or "failed"."""
    error = {"code": code, "message": message, "line": entry.line}
    return {"id": entry.id, "custom_id": entry.custom_id, "response": None, "error": error}


def _choice(task: Task, completion: Completion, tokenizer: Spelling) -> dict[str, Any]:
    spelled = _chat_logprobs(completion, tokenizer) if task.chat else _completion_logprobs(task, completion, tokenizer)
    choice: dict[str, Any] = {
        "index": completion.index,
        "logprobs": spelled if task.wants_logprobs else None,
        "finish_reason": completion.finish_reason,
    }
    if task.prompt_logprobs and task.prompt_score is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(task.prompt_score, tokenizer)
    if task.chat:
        return choice | {"message": {"role": "assistant", "content": completion.text}}
    return choice | {"text": completion.prompt * task.echo + completion.text}


def _prompt_logprobs(score: Score, tokenizer: Spelling) -> list[dict[str, Any] | None]:
    """Return an object for each token of a prompt, by its id, and None for a first one that nothing predicts."""
    rows = zip(score.token_ids, score.log_probs.tolist(), score.entropy.tolist(), strict=True)
    return [
        None
        if math.isnan(logprob)
        else {str(token): {"logprob": _shown(logprob), "entropy": entropy, "decoded_token": tokenizer.decode([token])}}
        for token, logprob, entropy in rows
    ]


def _chat_logprobs(completion: Completion, tokenizer: Spelling) -> dict[str, Any]:
    def spelled(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        is_text = "\N{REPLACEMENT CHARACTER}" not in text  # else the token is a part of a character
        return {"token": text, "logprob": _shown(logprob), "bytes": list(text.encode()) if is_text else None}

    def row(trace: TokenTrace) -> dict[str, Any]:
        return spelled(trace.token, trace.logprob) | {"top_logprobs": [spelled(*pair) for pair in trace.top]}

    return {"content": [row(trace) for trace in completion.trace]}


def _completion_logprobs(task: Task, completion: Completion, tokenizer: Spelling) -> dict[str, Any]:
    """Return the log-probabilities of a text, with `echo` after those of its prompt, which have no alternatives."""
    starts, length = [], 0
    tokens, logprobs, alternatives = [], [], []
    if task.echo and task.prompt_score is not None:
        for token, logprob in zip(task.prompt_score.token_ids, task.prompt_score.log_probs.tolist(), strict=True):
            text = tokenizer.decode([token])
            tokens.append(text)
            logprobs.append(None if math.isnan(logprob) else _shown(logprob))
            alternatives.append(None)
            starts.append(min(length, len(completion.prompt)))
            length += len(text)
        length = len(completion.prompt)
    for trace in completion.trace:
        starts.append(length)
        length += len(trace.text)
    tokens += [tokenizer.decode([trace.token]) for trace in completion.trace]
    logprobs += [_shown(trace.logprob) for trace in completion.trace]
    alternatives += [
        {tokenizer.decode([token]): _shown(logprob) for token, logprob in trace.top} for trace in completion.trace
    ]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": starts}


def _shown(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
