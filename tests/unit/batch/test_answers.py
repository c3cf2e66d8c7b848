"""Rows of the output, as OpenAI documents its completion bodies."""

import time
from typing import Any

from stand_in import Letters, PaperModel, completion, trace

from et_jax.batch.answers import answer_row
from et_jax.batch.serving import serve_entries
from et_jax.batch.tasks import Defaults, Entry, Task
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams

ENTRY = Entry(line=3, custom_id="a", id="batch_req_12", values={})


def row(*, chat: bool, wants_logprobs: bool = False, **changes: Any) -> dict[str, Any]:
    request = GenerationRequest(prompt="It was", params=SamplingParams(n=2))
    task = Task(entry=ENTRY, request=request, chat=chat, wants_logprobs=wants_logprobs)
    both = [completion("It was", "yes", 1, **changes), completion("It was", "no", 0)]
    return answer_row(task, both, "paper", Letters())


def test_a_completion_body():
    before = int(time.time())
    answer = row(chat=False)
    body = answer["response"]["body"]
    assert before <= body.pop("created") <= time.time()
    assert body.pop("entropic") == {
        "entropic_time": 4.0,  # two continuations of 2 nats
        "cost_bytes": 50.0,  # five tokens of 10 bytes
        "flops": 100.0,
        "nats_per_byte": 0.08,
        "mean_entropy": 1.0,
        "mean_surprisal": 0.25,
        "mean_constrained_entropy": None,
        "share_read": 0.5,
        "share_bytes": None,
        "least_mass_kept": 0.9,
        "mean_attention_entropy": None,
        "temperature_range": [0.5, 0.5],
        "guard_rates": {"stability": 0.25},
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "audited_tokens": 0,
        "agreed_tokens": 0,
        "prompt_share_read": None,
        "prompt_mass_kept": None,
        "tokens_cached": 15,  # six of the prompt and all but the last of the text, of both
        "tokens_left_out": 0,
        "small_share": None,
    }
    choice = {"logprobs": None, "finish_reason": "length"}
    assert answer == {
        "id": "batch_req_12",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_12",
            "body": {
                "id": "cmpl-12",
                "object": "text_completion",
                "model": "paper",
                "choices": [{"index": 0, "text": "no"} | choice, {"index": 1, "text": "yes"} | choice],
                "usage": {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11},
            },
        },
        "error": None,
    }


ROWS = (trace(ord("é"), "é", top=((ord("x"), -0.5), (0xFFFD, float("-inf")))), trace(ord("b"), "b"))


def test_logprobs_of_a_chat_and_of_a_completion():
    def told(chat: bool):
        return row(chat=chat, wants_logprobs=True, trace=ROWS)["response"]["body"]["choices"][1]["logprobs"]

    first, second = told(chat=True)["content"]
    assert second == {"token": "b", "logprob": -0.25, "bytes": [98], "top_logprobs": []}
    assert (first["token"], first["bytes"]) == ("é", [195, 169])  # UTF-8
    assert first["top_logprobs"] == [
        {"token": "x", "logprob": -0.5, "bytes": [120]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": None},
    ]
    assert told(chat=False) == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"x": -0.5, "\ufffd": -9999.0}, {}],
        "text_offset": [0, 1],
    }


def test_a_prompt_is_scored_if_its_line_asks_for_that():
    def answered(**fields: Any) -> dict[str, Any]:
        values = {"prompt": "It", "max_tokens": 1} | fields
        entry, rows = Entry(line=1, custom_id="a", id="batch_req_1", values=values), []

        def ended(task: Task, completions: list[Completion]) -> None:
            rows.append(answer_row(task, completions, "paper", Letters()))

        defaults = Defaults(params=SamplingParams())
        serve_entries(PaperModel(), [entry], defaults, ended=ended, refused=lambda _, said: rows.append(said))
        return rows[0]["response"]["body"]["choices"][0]

    text = answered()["text"]
    echoed = answered(echo=True, logprobs=0)
    assert echoed["text"][:2] == "It" and len(echoed["text"]) == 2 + len(text)
    assert echoed["logprobs"] == {
        "tokens": ["I", "t", echoed["text"][2]],
        "token_logprobs": [None, -0.5, -0.25],
        "top_logprobs": [None, None, {}],
        "text_offset": [0, 1, 2],
    }
    found = answered(prompt_logprobs=0)
    assert found["prompt_logprobs"] == [None, {"116": {"logprob": -0.5, "entropy": 2.0, "decoded_token": "t"}}]
    assert found["logprobs"] is None and len(found["text"]) == len(text)
