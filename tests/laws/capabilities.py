"""The table of capabilities: every way to serve a model, each held to every law of this folder.

A capability joins by a row here, a law by a file beside this one.
"""

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from own_modules import LENGTH, Plain
from safetensors.numpy import save_file
from small_model import a_little_warmer, by_entropy, even_blocks

import et_jax
from et_jax.control import clock, priority
from et_jax.control.base import chain
from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.control.experts import Entropy
from et_jax.control.presets import preset
from et_jax.models import stacks
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import write_calibration
from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.config import ExpertConfig, ModelConfig
from et_jax.models.module import ModuleConfig
from et_jax.models.transformer import initialise
from et_jax.serve.engine import Model
from et_jax.text import load_tokenizer
from et_jax.types import replace
from scripts.measuring import shapes
from scripts.measuring.selectors import keeping

SIZES = {
    "max_num_seqs": 3,
    "max_resident_seqs": 4,
    "max_model_len": LENGTH,
    "num_pages": 60,
    "page_size": 4,
    "prefill_batch": 16,
    "max_num_batched_tokens": 32,
    "compilation_cache": None,
}
"""Four slots of which three advance, and fewer pages than they may fill."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TINY = replace(shapes.SMALL, architecture="mistral", vocab_size=4096, max_positions=LENGTH)
SLIDING = replace(TINY, windows=(14, 14))
MIXTURE = replace(
    TINY,
    architecture="mixtral",
    intermediate_size=24,
    experts=ExpertConfig(num_experts=6, num_per_token=3, width=24, normalised=True, layers=(True, True)),
)
WIDE = replace(TINY, num_heads=8)  # of two KV heads: over four devices each is there twice
WIDE_MIXTURE = replace(MIXTURE, num_heads=8, num_kv_heads=4)
SMALL, WIDE_SMALL = (replace(one, num_layers=1, windows=(None,)) for one in (TINY, WIDE))
"""The first layer of each: some drafts hold."""


@functools.cache
def folder(config: ModelConfig) -> Path:
    """A checkpoint of random weights, large enough for attention and entropy to show, and what its heads weigh."""
    path = Path(tempfile.mkdtemp(prefix="tiny-model-"))
    deep = {SMALL: TINY, WIDE_SMALL: WIDE}.get(config, config)
    drawn = initialise(deep, jax.random.key(0), jnp.float32)
    drawn = jax.tree.map(lambda x: x * (5 if x.ndim > 1 else 1), drawn)
    drawn = replace(drawn, head=jax.tree.map(lambda x: 10 * x, drawn.head), layers=drawn.layers[: config.num_layers])
    write_hugging_face(path, config, drawn)
    for name in TOKENIZER_FILES:
        shutil.copy(bundled_folder() / name, path / name)
    write_calibration(path, shapes.even_heads(config), {})
    return path


@functools.cache
def adapter(rank: int, config: ModelConfig = TINY) -> Path:
    """An adapter of a model's attention, of a scale at which texts differ."""
    path, drawn, tensors = Path(tempfile.mkdtemp(prefix="adapter-")), np.random.default_rng(rank), {}
    wide, heads, kv_heads = config.hidden_size, *(n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    shapes = {"q_proj": (heads, wide), "v_proj": (kv_heads, wide), "o_proj": (wide, heads)}
    matrices = ((f"layers.{i}.self_attn.{one}", shape) for i in range(2) for one, shape in shapes.items())
    for name, (outputs, inputs) in matrices:
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.model.{name}.lora_{part}.weight"] = drawn.normal(0, 0.4, shape).astype(
                np.float32
            )
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*shapes]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def first_come(signals, state):
    return 1000.0 - signals.arrival.astype(jnp.float32)


def tiny(config: ModelConfig = TINY, **settings: Any) -> Model:
    return et_jax.load(str(folder(config)), **SIZES | settings)


@functools.cache
def module() -> nnx.Module:
    return Plain(TINY.vocab_size, rngs=nnx.Rngs(3))


def stacked(config: ModelConfig = TINY, **settings: Any) -> Model:
    """A model whose layers are stacked, as on a chip."""
    with mock.patch.object(stacks, "stacked_on", lambda _: True):
        return tiny(config, **settings)


def of_module(**settings: Any) -> Model:
    tokenizer = load_tokenizer(bundled_folder())
    return et_jax.load(module(), config=ModuleConfig(max_positions=LENGTH), tokenizer=tokenizer, **SIZES | settings)


def own_controller() -> Controller:
    """A law, a temperature rule, a selector and a priority of a caller's own, all plain functions."""
    return Controller(
        law=chain(clock.FallClock(), by_entropy),
        temperature_rule=a_little_warmer,
        selector=even_blocks,  # of four tokens
        priority=priority.Aged(first_come, ceiling=1000.0, rate=0.5),
    )


def pruned(name: str, **knobs: Any) -> Controller:
    return preset(name, **{"min_blocks": 1, "window": 4, "target_entropy": 2.0} | knobs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """A model and its settings.

    `dense` are numbers of a request under which short texts are those of the dense model, None where there are none.
    `prunes` says whether blocks are left unread, `drafts` whether drafts are seen to hold, `certifies` the share of
    attention mass that no head may pass over, `keeps_prefixes` whether pages of prompts are kept for others.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    load: Callable[..., Model] = tiny
    dense: Mapping[str, float] | None = dataclasses.field(default_factory=dict)
    prunes: bool = False
    drafts: bool = False
    certifies: float | None = None
    keeps_prefixes: bool = True

    def opened(self, **settings: Any) -> Model:
        return self.load(**dict(self.settings) | settings)


SPLIT = named("adakv", 20, window=8, gap=4, every=8)  # heads keep different numbers of entries
_DRAFTS = {"draft_tokens": 3, "draft_length": "fixed"}
_LOOKUP = {"draft": "lookup"} | _DRAFTS
_SELF = {"draft": "self", "draft_share": 0.2} | _DRAFTS


_pruning = functools.partial(Capability, dense={"tolerance": 0.0}, prunes=True)


def _small(config: ModelConfig = SMALL) -> str:
    return str(folder(config))


SLOW = {
    *("window, bfloat16, small", "cache and weights in int8, self", "module, adaptive, kept", "own, budget"),
    *("ead", "compressed by head", "paper, stacked, experts by entropy"),
    *("over devices, lookup", "over devices, certified, self", "over devices, compressed by head"),
    *("over devices, budget", "over devices, ead"),
}
"""Those that are tried with `-m slow` alone: what they add to another row is little."""

CAPABILITIES: dict[str, Callable[[], Capability]] = {
    "plain": Capability,
    "window, bfloat16, small": lambda: Capability(
        load=functools.partial(tiny, SLIDING), settings={"dtype": "bfloat16", "draft": _small()} | _DRAFTS, drafts=True
    ),
    "cache and weights in int8, self": lambda: _pruning(
        settings={"cache_dtype": "int8", "quantize": "int8", "control": pruned("certified", tolerance=0.5)} | _SELF,
        drafts=True,
        certifies=0.5,
    ),
    "module, adaptive, kept": lambda: _pruning(
        load=of_module,
        settings={"control": keeping(pruned("adaptive", tolerance=0.3, min_context=24), 3), "calibration": "none"},
    ),
    "own, budget": lambda: Capability(
        settings={"control": replace(own_controller(), budget=preset("entropyinfer", prefill_budget=16).budget)},
        dense=None,
        prunes=True,
        keeps_prefixes=False,
    ),
    "certified": lambda: _pruning(settings={"control": pruned("certified", tolerance=0.5)}, certifies=0.5),
    "ead": lambda: Capability(
        load=functools.partial(tiny, WIDE),  # of which sequences wait at the end of a page when they are preempted
        settings={"control": preset("ead_guarded", tau=3.0), "small": _small(WIDE_SMALL)},
        dense={"tau": -1.0},
    ),
    "experts by mass, adapters": lambda: Capability(
        load=functools.partial(tiny, MIXTURE),
        settings={"experts": "mass", "expert_share": 0.6, "adapters": {"a": adapter(2), "b": adapter(3)}} | _LOOKUP,
        dense={"share": 1.0},
        drafts=True,
    ),
    "compressed by head": lambda: Capability(
        settings={"cache_budget": SPLIT} | _SELF | {"draft": "lookup+self"}, dense=None, prunes=True, drafts=True
    ),
    "paper, stacked, experts by entropy": lambda: _pruning(
        load=functools.partial(stacked, MIXTURE),
        settings={"control": pruned("paper", tolerance=0.5), "experts": Entropy(least=0.3)},
        dense={"tolerance": 0.0, "least": 1.0},
    ),
}


def _over_devices(
    one: Capability, config: ModelConfig = WIDE, load: Callable[..., Model] = tiny, **more: Any
) -> Capability:
    """The same over four devices, of a model that they can split."""
    settings = {"tensor_parallel": 4} | dict(one.settings) | more
    return replace(one, load=functools.partial(load, config), settings=settings)


OVER_DEVICES: dict[str, Callable[[], Capability]] = {
    "over devices, lookup": lambda: _over_devices(Capability(settings=_LOOKUP, drafts=True), dtype="float32"),
    "over devices, certified, self": lambda: _over_devices(
        replace(CAPABILITIES["certified"](), drafts=True), dtype="float32", **_SELF
    ),
    "over devices, adaptive, int8, adapters": lambda: _over_devices(
        _pruning(settings={"cache_dtype": "int8", "quantize": "int8", "control": pruned("adaptive", tolerance=0.3)}),
        adapters={"a": adapter(2, WIDE), "b": adapter(3, WIDE)},
    ),
    "over devices, ead": lambda: _over_devices(CAPABILITIES["ead"]()),
    "over devices, compressed by head": lambda: _over_devices(
        Capability(settings={"cache_budget": SPLIT}, dense=None, prunes=True)
    ),
    "over devices, budget": lambda: _over_devices(
        Capability(settings={"control": preset("entropyinfer", prefill_budget=16)}, dense=None, keeps_prefixes=False)
    ),
    "over devices, paper, stacked, experts by entropy": lambda: _over_devices(
        CAPABILITIES["paper, stacked, experts by entropy"](), WIDE_MIXTURE, stacked
    ),
}
"""Those over four devices, which `-m devices` tries."""
