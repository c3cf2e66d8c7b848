"""The engine on a real model of 656k weights: what is asked for is what comes, and company changes nothing."""

import collections
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from places import GOLDEN
from reopened import reopened

from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration, write_calibration
from et_jax.serve import engine, loading
from et_jax.serve import model as model_module
from et_jax.serve.min_context import MEASURED, told
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import Table

pytestmark = pytest.mark.usefixtures("hardly_optimised")

ONCE = "Once upon a time"
LILY = "One day, a little girl named Lily found a needle in her"
TOM = "Tom and his dog went to the"


@pytest.fixture(scope="module")
def folder(shared):
    folder = shared / "models/tinystories-656k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


def opened(folder, **settings) -> engine.Model:
    return engine.load(str(folder), compilation_cache=None, **settings)


@pytest.fixture(scope="module")
def model(folder):
    return opened(folder, max_num_seqs=3, prefill_batch=32)


def of(completion):
    """What a text is, without what its company may change."""
    return completion.prompt, completion.index, completion.text, completion.token_ids, completion.finish_reason


def test_greedy_texts_equal_those_of_transformers(model):
    rows = json.loads((GOLDEN / "tinystories-656k.json").read_text())
    done = model.generate([row["prompt"] for row in rows], temperature=0.0, max_tokens=200)
    for row, completion in zip(rows, done, strict=True):
        assert completion.prompt == row["prompt"] and completion.prompt_tokens == len(row["prompt_ids"])
        assert list(completion.token_ids) == row["ids"]
        assert completion.finish_reason == ("stop" if row["stopped"] else "length")
        assert completion.text.strip() == row["text"].strip()


def test_completions_come_in_the_order_of_the_prompts_n_of_each(model):
    done = model.generate([ONCE, TOM], n=3, max_tokens=8, seed=4)
    assert [(c.prompt, c.index) for c in done] == [(prompt, i) for prompt in (ONCE, TOM) for i in range(3)]
    assert len({c.token_ids for c in done}) == 6
    assert all(len(c.token_ids) == len(c.trace) == 8 and c.finish_reason == "length" for c in done)


def test_more_prompts_than_slots_give_the_texts_they_give_one_by_one(model):
    prompts = [ONCE, LILY, TOM, "The big bear was sad because", "A cat", "He said:"]
    params = SamplingParams(max_tokens=20, seed=9, temperature=0.9, top_p=0.95)
    together = model.generate(prompts, params)
    assert [of(c) for c in together] == [of(model.generate(prompt, params)[0]) for prompt in prompts]


def test_a_control_is_resolved_once_for_all_requests_of_a_call(model, monkeypatch):
    resolved, beside = [], model_module.beside

    def counted(settings, config, laws, *more, **named):
        resolved.append(laws)
        return beside(settings, config, laws, *more, **named)

    monkeypatch.setattr(model_module, "beside", counted)
    requests = [GenerationRequest(prompt=ONCE, params=SamplingParams())] * 20
    controls = [preset("guarded"), preset("off"), "guarded"]
    for control in controls:
        sequences = model._checked(requests, control)
        assert all(one.laws == model.settings.laws_of(control) for one in sequences)
    assert resolved == [model.settings.laws_of(control) for control in controls]
    with pytest.raises(UsageError, match=r'^control is "nobody"'):
        model.generate(ONCE, control="nobody")


def test_each_of_n_is_drawn_from_its_own_key_whether_pages_are_shared_or_not(model):
    """Five do not fit three slots: the first three share their prompt's pages, the others are read anew."""
    five = model.generate(TOM, n=5, max_tokens=10, seed=2)
    three = model.generate([ONCE, TOM], n=3, max_tokens=10, seed=2)[3:]
    assert [of(c) for c in five[:3]] == [of(c) for c in three]
    assert len({c.token_ids for c in five}) == 5


def test_a_seed_is_a_text(model):
    def text(seed):
        return model.generate(ONCE, max_tokens=15, seed=seed)[0].token_ids

    assert text(0) == text(0) != text(1)
    assert text(2**63 - 1) not in (text(2**31 - 1), text(2**32 - 1))  # both halves of the seed count


@pytest.mark.parametrize(
    "stop", [(" girl",), ("irl nam",), ("never", "Lily"), (" little girl named Lily lived", "ttle")]
)
def test_a_stop_string_ends_the_text_before_itself(model, stop):
    whole = model.generate(ONCE, temperature=0.0, max_tokens=40)[0].text
    assert any(s in whole for s in stop)
    ends = {s: whole.find(s) + len(s) for s in stop if s in whole}
    first = min(ends, key=lambda s: ends[s])
    completion = model.generate(ONCE, temperature=0.0, max_tokens=40, stop=stop)[0]
    assert completion.text == whole[: whole.find(first)]
    assert completion.finish_reason == "stop"
    assert "".join(row.text for row in completion.trace) == completion.text


def test_a_stop_id_ends_the_text_and_an_end_token_may_be_ignored(model):
    whole = model.generate(ONCE, temperature=0.0, max_tokens=30)[0]
    stop = whole.token_ids[7]
    completion = model.generate(ONCE, temperature=0.0, max_tokens=30, stop_token_ids=(stop,))[0]
    assert completion.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == model.tokenizer.decode(list(completion.token_ids[:-1]))
    rows = json.loads((GOLDEN / "tinystories-656k.json").read_text())
    row = next(row for row in rows if row["stopped"])
    longer = model.generate(row["prompt"], temperature=0.0, max_tokens=len(row["ids"]) + 5, ignore_eos=True)[0]
    assert list(longer.token_ids[: len(row["ids"])]) == row["ids"]
    assert longer.finish_reason == "length" and len(longer.token_ids) == len(row["ids"]) + 5


def test_a_text_ends_where_the_model_does(folder, model):
    """512 positions hold the prompt and the text; a limit beyond that is cut."""
    tokens = model.tokenizer.encode(ONCE)
    completion = model.generate([tokens * 80], max_tokens=10_000, ignore_eos=True)[0]
    assert len(completion.token_ids) == 512 - len(tokens) * 80 and completion.finish_reason == "length"


def test_alternatives_are_the_likeliest_of_the_dense_model_in_order(model):
    completion = model.generate(ONCE, max_tokens=12, logprobs=5, seed=3)[0]
    tokens = model.tokenizer.encode(ONCE)
    logits = np.asarray(
        dense_logits(model.config, model.params, np.int32([[*tokens, *completion.token_ids]])), np.float64
    )
    logits = logits[0, len(tokens) - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, expected in zip(completion.trace, logprobs, strict=True):
        likeliest = np.argsort(-expected, kind="stable")[:5]
        assert [token for token, _ in row.top] == likeliest.tolist()
        np.testing.assert_allclose([logprob for _, logprob in row.top], expected[likeliest], atol=1e-4)
        assert np.exp([logprob for _, logprob in row.top]).sum() <= 1 + 1e-6
        assert row.logprob == pytest.approx(expected[row.token], abs=1e-4)
        assert dict(row.top).get(row.token, row.logprob) == pytest.approx(row.logprob, abs=1e-5)
        assert row.entropy == pytest.approx(-(np.exp(expected) * expected).sum(), abs=1e-4)
    plain = model.generate(ONCE, max_tokens=12, seed=3)[0]
    assert plain.token_ids == completion.token_ids and all(row.top == () for row in plain.trace)


def test_lists_of_tokens_are_prompts_too(model):
    tokens = model.tokenizer.encode(ONCE)
    by_id, mixed, text = (model.generate(p, max_tokens=10, seed=1) for p in ([tokens], [ONCE, tokens], ONCE))
    assert by_id[0].token_ids == text[0].token_ids == mixed[0].token_ids == mixed[1].token_ids
    assert by_id[0].prompt_tokens == len(tokens)
    single = model.generate([[tokens[0]]], max_tokens=5)[0]  # nothing to prefill
    assert single.prompt_tokens == 1 and len(single.token_ids) == 5


def test_penalties_change_what_is_drawn_as_their_formulas_say(model):
    """Greedy with a frequency penalty is the argmax of dense logits less what was counted so far."""
    completion = model.generate(TOM, temperature=0.0, max_tokens=40, frequency_penalty=0.7, presence_penalty=0.2)[0]
    tokens = model.tokenizer.encode(TOM)
    written = list(completion.token_ids)
    logits = np.asarray(dense_logits(model.config, model.params, np.int32([[*tokens, *written]])), np.float64)
    counts = collections.Counter()
    for i, token in enumerate(written):
        row = logits[0, len(tokens) - 1 + i].copy()
        for seen, count in counts.items():
            row[seen] -= 0.7 * count + 0.2
        assert row.argmax() == token
        counts[token] += 1
    assert completion.token_ids != model.generate(TOM, temperature=0.0, max_tokens=40)[0].token_ids
    barred = model.generate(TOM, temperature=0.0, max_tokens=40, repetition_penalty=1e6)[0]
    assert len({*barred.token_ids, *tokens}) == len(tokens) + 40  # nothing of prompt or text comes twice


@pytest.mark.parametrize(("penalty", "beyond"), [("frequency_penalty", -3e38), ("repetition_penalty", 1e-38)])
def test_logits_that_overflow_end_their_sequence_and_no_other(model, penalty, beyond):
    """No request may ask for so much; were it to come about, it would not draw a token of what is no distribution."""
    fine, faulty = SamplingParams(max_tokens=12, seed=3), SamplingParams(max_tokens=12, seed=3)
    object.__setattr__(faulty, penalty, beyond)
    alone = model.generate(TOM, fine)[0]
    other, ended = model.generate([GenerationRequest(prompt=TOM, params=params) for params in (fine, faulty)])
    assert of(other) == of(alone)
    assert ended.finish_reason == "error" and "overflow under these penalties or at this temp" in ended.error
    assert len(ended.token_ids) < 12


def test_text_is_the_decoded_tokens_and_the_pieces_add_up(model):
    pieces, ends = collections.defaultdict(str), {}
    for event in model.stream([ONCE, TOM], max_tokens=25, seed=6):
        pieces[event.prompt_index] += event.text
        if event.completion:
            ends[event.prompt_index] = event.completion
    for index, completion in ends.items():
        assert pieces[index] == completion.text == "".join(row.text for row in completion.trace)
        whole = model.tokenizer.decode(model.tokenizer.encode(completion.prompt) + list(completion.token_ids))
        assert whole.endswith(completion.text)
        summary = completion.to_dict()
        assert summary["usage"] == {"prompt_tokens": completion.prompt_tokens, "completion_tokens": 25}
        assert summary["entropic"]["share_read"] == 1.0
        falls = -np.diff([row.entropy for row in completion.trace])
        assert completion.entropic_time == pytest.approx(np.maximum(falls, 0).sum(), rel=1e-4)


def test_what_was_written_before_an_interrupt_is_kept(model):
    whole = model.generate([ONCE, TOM], max_tokens=100, seed=5)
    events = []
    for event in model.stream([ONCE, TOM, LILY, ONCE], max_tokens=100, seed=5, cancelled=lambda: len(events) >= 12):
        events.append(event)
    ends = [event.completion for event in events if event.completion]
    assert len(ends) == 4 and {c.finish_reason for c in ends} == {"abort"}
    for event in events:
        if event.completion:
            streamed = "".join(e.text for e in events if e.prompt_index == event.prompt_index)
            assert streamed == event.completion.text
    first = {event.prompt_index: event.completion for event in events if event.completion}
    for index in (0, 1):
        assert 0 < len(first[index].token_ids) < 100
        assert first[index].token_ids == whole[index].token_ids[: len(first[index].token_ids)]
    assert first[3].token_ids == () and first[3].text == "" and first[3].entropic_time == 0


@pytest.mark.parametrize("prompts", ["", [ONCE, ""], [[]], [[1, 5], []]])
def test_an_empty_prompt_is_refused_before_anything_runs(model, prompts):
    with pytest.raises(UsageError, match=r"^The prompt is empty; give it at least one character\.$"):
        model.generate(prompts)


def test_a_prompt_that_is_too_long_is_refused(model):
    with pytest.raises(
        UsageError, match=r"The prompt has 512 tokens and .* holds 512 with the text; shorten the prompt"
    ):
        model.generate([[5] * 512])


@pytest.mark.parametrize("token", [2048, -1, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(UsageError, match=rf"token {token}, and .* has tokens 0 to 2047"):
        model.generate([[1, token, 5]], max_tokens=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1."),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or above."),
        ({"temperature": float("nan")}, "temperature is nan; it must be a finite number."),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or above."),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1 (off)."),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 (off) to 1."),
        ({"frequency_penalty": -3e38}, "frequency_penalty is -3e+38; it must be from -1000000 to 1000000 (0 is off)."),
        (
            {"repetition_penalty": 1e-38},
            "repetition_penalty is 1e-38; it must be from 1/1000000 to 1000000 (1 is off).",
        ),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be from 1/1000000 to 1000000 (1 is off)."),
        ({"seed": -1}, "seed is -1; it must be from 0 to 2^63 - 1."),
        ({"n": 0}, "n is 0; it must be at least 1."),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20."),
        ({"stop": ("",)}, 'stop holds ""; it must be a text or a list of texts that are not empty.'),
        ({"stop_token_ids": tuple(range(9))}, "holds 9 ids; it may hold 8 at most"),
    ],
)
def test_a_setting_out_of_range_is_told_in_one_sentence(model, settings, message):
    with pytest.raises(UsageError) as refused:
        model.generate(ONCE, **settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_very_large_top_k_is_no_truncation(model):
    texts = [model.generate(ONCE, max_tokens=5, top_k=k)[0].token_ids for k in (0, 2048, 2**40)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("token", [2**40, 2048, -1])
def test_a_stop_id_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(UsageError, match=rf"stop_token_ids holds the token {token}, and .* has tokens 0 to 2047"):
        model.generate(ONCE, max_tokens=5, stop_token_ids=(1, token))


@pytest.mark.slow
def test_a_pool_that_holds_one_at_a_time_serves_all_and_refuses_what_never_fits(folder, model):
    """Nine pages of 16 are 144 tokens: enough for one text of 100 tokens, never for two."""
    small = opened(folder, max_num_seqs=3, prefill_batch=32, num_pages=10)
    params = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)
    with pytest.raises(
        UsageError, match=r"7 tokens and 300 more need 20 pages of 16 tokens and the pool holds 9; raise"
    ):
        small.generate(TOM, max_tokens=300)
    assert [of(c) for c in small.generate([ONCE, TOM], params)] == [of(c) for c in model.generate([ONCE, TOM], params)]


def test_sizes_that_cannot_work_are_refused(folder):
    for settings in ({"max_model_len": 1}, {"max_model_len": 513}):
        with pytest.raises(UsageError, match="was made for 512 tokens, so choose from 2 to that"):
            opened(folder, **settings)
    with pytest.raises(UsageError, match="must be at least 1"):
        opened(folder, max_num_seqs=0)
    with pytest.raises(UsageError):
        opened(folder / "nothing here")


def test_weights_that_are_no_numbers_end_a_text_with_an_explanation(folder, model):
    params = model.params
    broken = dataclasses.replace(params, final_norm=params.final_norm.at[0].set(np.nan))
    spoilt = reopened(model, params=broken)
    completion = spoilt.generate(ONCE, max_tokens=10)[0]
    assert completion.finish_reason == "error" and completion.text == "" and completion.token_ids == ()
    assert "The logits after 0 tokens are not numbers" in str(completion.error)


@pytest.mark.parametrize("made", [lambda: "certified", lambda: preset("certified", window=16)])
def test_a_request_sets_the_knobs_of_the_preset_that_serves_it(model, made):
    """Under their bounds, however the control was named; a share above 1 is a number to the law alone."""

    def laws(**control):
        request = GenerationRequest(prompt=ONCE, params=SamplingParams(), control=control)
        return model.sequences(0, request, made())[0].laws

    of_all = model.settings.laws_of(made()).preset
    assert laws(tolerance=0.5).preset == dataclasses.replace(of_all, tolerance=0.5)
    with pytest.raises(UsageError, match=r"tolerance is 1\.5; it must be a share of attention"):
        laws(tolerance=1.5)


@pytest.mark.slow
def test_control_is_a_preset_by_name_or_a_controller(model):
    plain = model.generate(LILY, max_tokens=20, seed=5)[0]
    for control in ("guarded", preset("certified", tolerance=0.0)):
        completion = model.generate(LILY, max_tokens=20, seed=5, control=control)[0]
        assert len(completion.token_ids) == len(plain.token_ids)
        assert completion.efficiency == completion.entropic_time / completion.cost
    assert completion.token_ids == plain.token_ids
    assert completion.flops > plain.flops and completion.cost > plain.cost  # summaries and codes are looked at
    with pytest.raises(UsageError, match="control is"):
        model.generate(ONCE, control="strict")


@pytest.mark.slow
def test_adaptive_reads_by_the_measured_sensitivity_and_is_refused_without_one(folder, model, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    c = model.config
    even = np.full((c.num_layers, c.num_kv_heads, c.group_size), 0.05, np.float32)
    write_calibration(tmp_path, Calibration(sensitivity=Table(even)), {})
    measured = opened(tmp_path, max_num_seqs=3, prefill_batch=32)
    loose, careful = (preset("adaptive", tolerance=nats, window=16, min_blocks=1) for nats in (1.0, 1e-6))
    prompt = list(range(5, 5 + min(200, measured.max_model_len - 20)))
    few, most = (
        sum(row.blocks_read for row in measured.generate(prompt, max_tokens=12, seed=5, control=one)[0].trace)
        for one in (loose, careful)
    )
    assert few < 0.8 * most
    said = "has no measured sensitivity of its heads, which this control goes by; measure it with scripts/calibrate.py"
    with pytest.raises(UsageError, match=said):
        model.generate(ONCE, control="adaptive")
    with pytest.raises(UsageError, match=said):
        opened(folder, max_num_seqs=3, control="adaptive")


@pytest.mark.slow
def test_a_calibrated_model_measures_its_entropy_at_that_temperature(folder, model, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_calibration(tmp_path, Calibration(temperature=1.5), {})
    calibrated = opened(tmp_path, max_num_seqs=3, prefill_batch=32)
    got, plain = (m.generate(ONCE, max_tokens=6, temperature=0.0)[0] for m in (calibrated, model))
    assert got.token_ids == plain.token_ids and got.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    tokens = [*model.tokenizer.encode(ONCE), *plain.token_ids]
    logits = np.asarray(dense_logits(model.config, model.params, jnp.asarray([tokens]))[0, -7:-1], np.float64) / 1.5
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    np.testing.assert_allclose([row.entropy for row in got.trace], -(p * np.log(p)).sum(-1), atol=1e-3)


def test_a_model_describes_what_runs_where(model):
    lines = "\n".join(model.describe())
    assert "2 layers" in lines and "3 slots of 512 tokens" in lines and "97 pages of 16 tokens" in lines
    assert "blocks are chosen" not in lines


def test_a_model_describes_from_which_length_on_a_named_preset_chooses_blocks(folder):
    named, given = (opened(folder, control=one).describe() for one in ("certified", preset("certified")))
    assert f"blocks are chosen {told(MEASURED['cpu']['certified'])}; min_context 0 chooses always" in named
    assert not any("blocks are chosen" in line for line in given)


def test_a_list_of_ids_is_one_prompt(model):
    ids = model.tokenizer.encode(ONCE)
    [alone] = model.generate(ids, temperature=0.0, max_tokens=5)
    [listed] = model.generate([ids], temperature=0.0, max_tokens=5)
    assert alone.token_ids == listed.token_ids


def test_what_does_not_fit_is_refused_before_a_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr(loading, "usable_memory", lambda fraction: int(fraction * 2_000_000))
    monkeypatch.setattr(loading, "load_checkpoint", None)  # not callable: reading weights would be a TypeError
    with pytest.raises(UsageError, match=r"This needs .* and 1\.8 MB may be used: 2\.\d MB for weights in float32"):
        opened(folder)


def test_the_cache_has_the_pages_that_memory_leaves_room_for(folder, monkeypatch):
    monkeypatch.setattr(loading, "usable_memory", lambda fraction: int(fraction * 30_000_000))
    small = opened(folder, max_num_seqs=16)
    assert 32 < small.decoder_config.num_pages < 16 * 32 + 1
    assert any("pages of" in line and "for every sequence at once" in line for line in small.describe())
    with pytest.raises(UsageError, match="take num_pages"):
        opened(folder, max_num_seqs=16, num_pages=513)
