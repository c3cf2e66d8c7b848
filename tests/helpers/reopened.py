"""The same model and compiled programs, with another host around them."""

from et_jax.decode.config import DecoderConfig
from et_jax.models.params import Params
from et_jax.serve import engine
from et_jax.types import replace

SIZES = {"max_num_seqs": 4, "max_resident_seqs": 6, "max_model_len": 128, "num_pages": 40, "prefill_batch": 32}
"""Six slots of which four advance, and fewer pages than they may fill: whoever loads these shares programs."""


def reopened(
    model: engine.Model, *, config: DecoderConfig | None = None, params: Params | None = None, **settings
) -> engine.Model:
    """Return a model that has served nothing, under other settings, weights, or, compiled anew, another decoder."""
    other = engine.Model(
        replace(model.settings, **{"prefix_cache": True, "preempt_every": 0, "replicas": 1} | settings),
        config=config or model.decoder_config,
        weights=model.weights if params is None else (params,),
        others=model._others,
        tokenizer=model.tokenizer,
    )
    if config is None:
        other._decoders = model._decoders
    return other


def assert_balanced(model: engine.Model) -> None:
    """Nothing runs, and every page is back once no prefix is kept."""
    for replica in model.replicas().replicas:
        replica.forget_prefixes()
        table = replica.device.state.table
        assert replica.idle and int(table.num_free) == model.decoder_config.num_pages - 1
        assert replica.pool.num_free == int(table.num_free) and not table.references.any()
