"""Many requests at once: company, moves to the host, shared prefixes and chunk borders change no bit of a text."""

import asyncio
import gzip
import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from reopened import reopened

from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace

BRIEF = SamplingParams(max_tokens=4)
SENTENCE = "It was in the spring of that year that the old house by the river was let again, and nobody knew to whom. "


@pytest.fixture(scope="module")
def model():
    """Six slots of which four advance, and pages for about a quarter of what they could hold."""
    return engine.load(
        max_num_seqs=4,
        max_resident_seqs=6,
        max_model_len=256,
        num_pages=28,
        prefill_batch=64,
        max_num_batched_tokens=64,
    )


def opened(model, **settings) -> engine.Model:
    return reopened(model, **{"max_num_batched_tokens": 64} | settings)


def mixture(count: int, tokenizer, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of lengths around page and chunk borders, many of which begin alike, and all kinds of settings."""
    rng = np.random.default_rng(seed)
    tokens = tokenizer.encode(SENTENCE * 6)
    lengths = [1, 2, 16, 17, 31, 32, 33, 34, 64, 65, 66, 96, 97, 100, 129]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "logprobs": 3},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 20},
        {"stop": ("the", ". ")},
    ]
    requests = []
    for number in range(count):
        length, kind = lengths[rng.integers(len(lengths))], kinds[rng.integers(len(kinds))]
        start = int(rng.integers(3)) * 16  # three beginnings
        params = SamplingParams(max_tokens=int(rng.integers(1, 60)), seed=number, **kind)
        requests.append(GenerationRequest(prompt=tuple(tokens[start : start + length]), params=params))
    return requests


def balanced(monkeypatch, replica) -> list[int]:
    """Have the replica's count of free pages compared with the device's after every round; return how many so far.

    A round holds the replica's lock; once it is let go, the next round may have donated the state that is asked.
    """
    rounds, one_round = [0], replica._round

    def round_and_compare():
        one_round()
        rounds[0] += 1
        assert replica.pool.num_free == int(replica.device.state.table.num_free)

    monkeypatch.setattr(replica, "_round", round_and_compare)
    return rounds


def same(one, other) -> bool:
    """Whether two completions agree in every bit of every token, but for its cost: company shares the weights."""

    def whole(completion):
        trace = [replace(row, cost=0.0) for row in completion.trace]
        return completion.text, completion.token_ids, completion.finish_reason, trace

    return whole(one) == whole(other)


@pytest.fixture(scope="module")
def requests(model):
    return mixture(28, model.tokenizer)


@pytest.fixture(scope="module")
def alone(model, requests):
    """Every request by itself, nothing kept from one to the next."""
    quiet = opened(model, prefix_cache=False)
    return [quiet.generate(request)[0] for request in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False},
        {},
        {"preempt_every": 2},
        {"preempt_every": 1, "prefix_cache": False, "max_num_batched_tokens": 1000},
        {"preempt_every": 2, "replicas": 3},
    ],
    ids=["company", "prefixes", "swaps and prefixes", "swaps", "replicas"],
)
def test_every_text_has_the_bits_it_has_alone(model, requests, alone, settings, monkeypatch):
    busy = opened(model, **settings)
    rounds = [balanced(monkeypatch, replica) for replica in busy.replicas().replicas]
    together = busy.generate(requests)
    assert all(number[0] > 10 for number in rounds)
    assert [same(*pair) for pair in zip(together, alone, strict=True)] == [True] * len(requests)
    metrics = busy.metrics
    assert metrics.generated_tokens == sum(len(completion.token_ids) for completion in together)
    assert metrics.preemptions > 10 or "preempt_every" not in settings
    assert (metrics.cached_prompt_tokens > 0) == settings.get("prefix_cache", True)
    assert metrics.programs_compiled_late == 0


def test_a_pool_that_runs_short_preempts_and_no_text_changes(model):
    """Six sequences of two pages each are let in and grow to six pages each, of 27 there are."""
    tokens = model.tokenizer.encode(SENTENCE * 2)
    growing = [
        GenerationRequest(
            prompt=tuple(tokens[i : i + 17]), params=SamplingParams(max_tokens=75, ignore_eos=True, seed=i)
        )
        for i in range(12)
    ]
    quiet, busy = opened(model, prefix_cache=False), opened(model)
    apart = [quiet.generate(request)[0] for request in growing]
    assert all(same(*pair) for pair in zip(busy.generate(growing), apart, strict=True))
    assert busy.metrics.preemptions > 0 and quiet.metrics.preemptions == 0


def test_a_company_that_did_leak_would_be_seen(model, requests, alone):
    """The comparison above fails for a text drawn from another seed."""
    other = GenerationRequest(prompt=requests[1].prompt, params=SamplingParams(max_tokens=30, seed=99))
    first = GenerationRequest(prompt=requests[1].prompt, params=SamplingParams(max_tokens=30, seed=98))
    one, two = model.generate([first, other])
    assert not same(one, two)


def pages_in_use(model) -> list[int]:
    """The pages that each slot of the only replica holds, and the kept ones."""
    [replica] = model.replicas().replicas
    table = jax.device_get(replica.device.state.table)
    assert table.references.min() >= 0 and table.references[0] == 0
    assert int(table.num_free) == model.decoder_config.num_pages - 1 - int((table.references > 0).sum())
    assert not table.num_blocks.any() and replica.idle
    return [int((table.references > 0).sum()), replica.pool.num_kept]


def test_an_idle_engine_holds_no_page_but_those_kept_for_prompts_to_come(model, requests):
    busy = opened(model, preempt_every=3)
    busy.generate(requests[:12])
    used, kept = pages_in_use(busy)
    assert used == kept > 0
    [replica] = busy.replicas().replicas
    replica.forget_prefixes()
    assert pages_in_use(busy) == [0, 0]


def test_four_times_more_than_fit_all_end_and_nothing_piles_up(model):
    """Arrays and pages are as many after the fourth wave of requests as after the second."""
    busy = opened(model)
    counts = []
    for wave in range(4):
        requests = mixture(24, busy.tokenizer, seed=wave)
        done = busy.generate(requests)
        assert len(done) == 24 and {completion.finish_reason for completion in done} <= {"stop", "length"}
        pages_in_use(busy)
        del done
        counts.append(len(jax.live_arrays()))
    assert counts[-1] <= counts[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_recorded_traffic_leaves_memory_flat(shared):
    """The lengths of 1,500 requests, scaled down: all answered, pages back, memory as after the first third."""
    trace = shared / "traces/mooncake/conversation_trace.jsonl.gz"
    if not trace.exists():
        pytest.skip(f"{trace} is absent")
    busy = engine.load(max_num_seqs=16, max_model_len=256, num_pages=60, replicas=2, preempt_every=20)
    tokens = busy.tokenizer.encode(SENTENCE * 8)

    def arrivals():
        with gzip.open(trace, "rt") as file:
            for number, row in enumerate(itertools.islice(map(json.loads, file), 1500)):
                length = min(200, max(1, row["input_length"] // 200))
                start = row["hash_ids"][1] % 7 if len(row["hash_ids"]) > 1 else 0
                params = SamplingParams(max_tokens=max(1, row["output_length"] // 100), seed=number, ignore_eos=True)
                yield GenerationRequest(prompt=tuple(tokens[start : start + length]), params=params)

    answered, overtaken, bytes_at_a_third = set(), 0, 0
    for index, completion in busy.as_completed(arrivals()):
        assert completion.finish_reason == "length" and index not in answered
        overtaken = max(overtaken, len(answered) - index)
        answered.add(index)
        if len(answered) == 500:
            bytes_at_a_third = resident_bytes()
    assert len(answered) == 1500
    assert resident_bytes() < bytes_at_a_third * 1.05
    assert overtaken < 500 and busy.metrics.preemptions > 15 and busy.metrics.programs_compiled_late == 0
    for replica in busy.replicas().replicas:
        replica.forget_prefixes()
        assert int(replica.device.state.table.num_free) == busy.decoder_config.num_pages - 1 == replica.pool.num_free


def test_a_beginning_that_several_share_is_prefilled_once(model, monkeypatch):
    """Prompts that come together: one computes what they share, the others wait for it and take it over."""
    tokens = model.tokenizer.encode(SENTENCE * 3)
    shared, size = 4 * model.decoder_config.page_size, model.decoder_config.page_size
    asked = [
        GenerationRequest(prompt=(*tokens[:shared], *tokens[i : i + 5]), params=SamplingParams(max_tokens=4, n=2))
        for i in range(3)
    ]
    fresh = opened(model)
    [replica] = fresh.replicas().replicas
    calls, prefill = [], replica._prefill_chunks
    monkeypatch.setattr(replica, "_prefill_chunks", lambda chosen: (calls.append(len(chosen)), prefill(chosen)))
    together = fresh.generate(asked)
    assert fresh.metrics.prompt_tokens == 6 * (shared + 5)
    assert fresh.metrics.cached_prompt_tokens == 5 * shared
    assert sum(calls) == shared // size + 6 and len(calls) < 6  # whose ends stand in one call
    apart = opened(model, prefix_cache=False).generate(asked)
    assert all(same(*pair) for pair in zip(together, apart, strict=True))


def test_no_sequence_waits_for_pages_that_are_less_than_a_chunk(model, monkeypatch):
    """Two prompts that share one page of a chunk of two: what the first leaves cannot be taken over, so both go on."""
    size = model.decoder_config.page_size
    fresh = reopened(model, config=replace(model.decoder_config, chunk=2 * size), max_num_batched_tokens=512)
    tokens = model.tokenizer.encode(SENTENCE * 3)
    asked = [GenerationRequest(prompt=(*tokens[:size], *tokens[i : i + size]), params=BRIEF) for i in (1, 2)]
    asked += [GenerationRequest(prompt=(*tokens[: 2 * size], *tokens[i : i + 4]), params=BRIEF) for i in (1, 2)]
    [replica] = fresh.replicas().replicas
    calls, prefill = [], replica._prefill_chunks
    monkeypatch.setattr(replica, "_prefill_chunks", lambda chosen: (calls.append(len(chosen)), prefill(chosen)))
    fresh.generate(asked[:2])
    assert calls == [2] and fresh.metrics.cached_prompt_tokens == 0
    fresh.generate(asked[2:])
    assert calls == [2, 2, 1] and fresh.metrics.cached_prompt_tokens == 2 * size


def test_a_request_of_higher_priority_is_served_first_and_none_is_forgotten(model):
    busy = opened(model)
    tokens = tuple(busy.tokenizer.encode(SENTENCE)[:20])
    low = [
        GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=20, ignore_eos=True, seed=i))
        for i in range(18)
    ]
    high = [
        GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=20, ignore_eos=True, seed=i), priority=5.0)
        for i in range(6)
    ]
    order = [index for index, _ in busy.as_completed([*low, *high])]
    assert sorted(order) == list(range(24))
    assert set(order[:6]) == set(range(18, 24))


def test_a_deadline_hurries_a_request_that_has_waited(model):
    busy = opened(model)
    tokens = tuple(busy.tokenizer.encode(SENTENCE)[:20])
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = [GenerationRequest(prompt=tokens, params=params) for _ in range(18)]
    urgent = GenerationRequest(prompt=tokens, params=params, deadline=1e-3)
    order = [index for index, _ in busy.as_completed([*plain, urgent])]
    assert order.index(18) < 6


def test_completions_come_as_they_end_and_a_bad_request_is_an_answer_too(model):
    tokens = tuple(model.tokenizer.encode(SENTENCE)[:10])

    def endless():
        yield GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=40, ignore_eos=True))
        yield GenerationRequest(prompt="", params=SamplingParams())
        yield GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=2, ignore_eos=True, n=2))
        yield GenerationRequest(prompt=(1,) * 300, params=SamplingParams())
        for _ in itertools.count():
            yield GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=1))

    came = list(itertools.islice(model.as_completed(endless()), 30))  # taken lazily, or this would not end
    by_index = {index: completion for index, completion in came}
    assert "The prompt is empty" in by_index[1].error and by_index[1].finish_reason == "error"
    assert "300 tokens" in by_index[3].error
    ends = [index for index, _ in came]
    assert ends.count(2) == 2 and ends.index(2) < (ends.index(0) if 0 in ends else len(ends))
    assert not model.replicas().replicas[0].slots  # what was under way has left its slots


def test_streams_open_at_once_share_the_slots_and_keep_their_own_events(model, requests, alone):
    streams = {index: model.stream(requests[index]) for index in (0, 3, 5, 8)}
    texts = dict.fromkeys(streams, "")
    ended = {}
    while streams:
        for index, stream in list(streams.items()):
            event = next(stream, None)
            if event is None:
                del streams[index]
                continue
            texts[index] += event.text
            ended[index] = event.completion or ended.get(index)
    for index, text in texts.items():
        assert text == alone[index].text and same(ended[index], alone[index])


@pytest.mark.parametrize("replicas", [1, 2])
def test_asyncio_streams_run_side_by_side(model, requests, alone, replicas):
    served = opened(model, replicas=replicas)

    async def read(index: int):
        events = [event async for event in served.stream_async(requests[index])]
        return events[-1].completion

    async def read_all():
        return await asyncio.gather(*(read(index) for index in range(6)))

    for index, completion in enumerate(asyncio.run(read_all())):
        assert same(completion, alone[index])


def test_an_asyncio_stream_that_is_left_gives_its_slot_back(model, requests):
    async def leave():
        stream = model.stream_async(SENTENCE, max_tokens=100, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert model.replicas().idle


def test_a_closed_stream_gives_its_slot_back(model):
    stream = model.stream(SENTENCE, max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert model.replicas().idle


def test_a_model_goes_on_after_a_round_that_was_torn(model, requests, alone, monkeypatch):
    """An interrupt in mid-round loses the cache, not the model."""
    busy = opened(model)
    busy.generate(requests[0])
    [replica] = busy.replicas().replicas

    def torn(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(replica, "_prefill", torn)
    with pytest.raises(KeyboardInterrupt):
        busy.generate(requests[1])
    assert same(busy.generate(requests[1])[0], alone[1])


def test_progress_goes_to_the_screen_and_changes_nothing(model, requests, alone, capsys):
    done = model.generate(requests[:3], progress=True)
    assert all(same(*pair) for pair in zip(done, alone[:3], strict=True))
    assert "3/3" in capsys.readouterr().out


def test_sizes_that_cannot_work_are_refused(model):
    with pytest.raises(UsageError, match=r"max_resident_seqs is 3; it must be at least the 4 sequences"):
        engine.load(max_num_seqs=4, max_resident_seqs=3)
    with pytest.raises(UsageError, match="replicas is 0; it must be at least 1"):
        engine.load(replicas=0)
    with pytest.raises(UsageError, match="max_num_batched_tokens is 0; it must be at least 1"):
        engine.load(max_num_batched_tokens=0)
