"""The same model and compiled programs, with another host around them."""

from et_jax.models.params import Params
from et_jax.serve import engine
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace

SMALL = {"name": "bundled-small", "max_model_len": 128, "prefill_batch": 32}
SIZES = SMALL | {"max_num_seqs": 4, "max_resident_seqs": 6, "num_pages": 40}
"""Six slots of which four advance, and fewer pages than they may fill. Tests that load these share programs."""

TWO_SLOTS = SMALL | {"max_num_seqs": 2, "max_model_len": 96}


SENTENCE = "It was in the spring of that year that the old house by the river was let again. "


PROMPTS = ["It was", "The sea", "In the year 1801 the old king"]


def tokens_of(model: engine.Model, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    return [list(done.token_ids) for done in model.generate(prompts, params)]


def requested(prompt: str | tuple[int, ...], **params) -> GenerationRequest:
    """Return a request of these settings, whose text goes on to its limit."""
    return GenerationRequest(prompt=prompt, params=SamplingParams(**{"ignore_eos": True} | params))


def asked(tokenizer, count: int, *, longer: int, limit: int = 12, more: int = 1, **settings) -> list[GenerationRequest]:
    """Return requests whose seeds are their numbers, each with `longer` tokens of prompt and a limit `more` higher.

    Every third prompt begins alike.
    """
    tokens = tokenizer.encode(SENTENCE * 4)
    return [
        requested(tuple(tokens[i % 3 : 9 + longer * i]), **{"max_tokens": limit + more * i, "seed": i} | settings)
        for i in range(count)
    ]


def reopened(model: engine.Model, *, params: Params | None = None, **settings) -> engine.Model:
    """Return a model that has served nothing, under other settings or weights."""
    other = engine.Model(
        replace(model.settings, **{"prefix_cache": True, "preempt_every": 0, "replicas": 1} | settings),
        config=model.decoder_config,
        weights=model.weights if params is None else (params,),
        others=model._decoders.others,
        tokenizer=model.tokenizer,
    )
    other._decoders.compiled = model._decoders.compiled
    return other


def bits(completion: Completion, **ignored):
    """Every bit of a completion and its trace but its cost, which sequences of one batch share, and what is ignored."""
    trace = [replace(row, **{"cost": 0.0} | ignored) for row in completion.trace]
    return completion.text, completion.token_ids, completion.finish_reason, completion.tokens_left_out, trace


def assert_balanced(model: engine.Model) -> None:
    """Nothing runs, and every page is back once no prefix is kept."""
    replicas = model.replicas()
    replicas.forget_prefixes()
    for replica in replicas.replicas:
        table = replica.device.state.table
        assert replica.idle and int(table.num_free) == model.decoder_config.num_pages - 1
        assert replica.pool.num_free == int(table.num_free) and not table.references.any()
