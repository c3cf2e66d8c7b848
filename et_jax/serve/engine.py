"""The engine's entry point: `load` returns a model ready to generate."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from et_jax.control.compression import Compression
from et_jax.control.experts import ExpertRule
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.models.module import ModuleConfig, is_module
from et_jax.scope import own_settings, platform
from et_jax.serve.config import PROGRAMS, Control, EngineConfig
from et_jax.serve.loading.opened import opened, opened_module
from et_jax.serve.model import Model as Model
from et_jax.serve.use import untraced


@untraced
@own_settings()
def load(
    name: str | Path | Any = "bundled",
    *,
    config: ModuleConfig | None = None,
    tokenizer: Any = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    cache_dtype: str = "auto",
    page_size: int | None = None,
    max_model_len: int | None = None,
    num_pages: int | None = None,
    max_num_seqs: int = 8,
    max_resident_seqs: int | None = None,
    max_num_batched_tokens: int = 512,
    prefill_batch: int | None = None,
    prefix_cache: bool = True,
    preempt_every: int = 0,
    replicas: int = 1,
    tensor_parallel: int = 1,
    control: Control = "off",
    draft: str | Path | None = None,
    draft_tokens: int | None = None,
    draft_length: str | None = None,
    draft_share: float | None = None,
    small: str | Path | None = None,
    lazy_prefill: bool = False,
    audit: bool = False,
    trace_reads: bool = False,
    cache_budget: int | Compression | None = None,
    cache_policy: str | None = None,
    experts: str | ExpertRule | None = None,
    expert_share: float | None = None,
    calibration: str = "auto",
    backend: str | None = None,
    memory_fraction: float = 0.9,
    compilation_cache: str | Path | None = PROGRAMS,
    progress: Callable[[str], None] | None = None,
) -> Model:
    """Return a model ready to generate.

    `name` is "bundled", "bundled-small", "smollm2", "gemma3-270m", a Hugging Face folder, a GGUF file, or a hub name
    "owner/model".

    `name` may also be a `flax.nnx.Module`. `module(tokens, positions)`, both [batch, length], must return logits
    [batch, length, vocabulary]. A module requires a `config` and a `tokenizer`: a tokenizer.json, a folder that
    contains it, a `tokenizers.Tokenizer`, or the tokenizer of another model. Its attention layers must call an
    attribute `attention_fn` with queries, keys and values [batch, length, heads, head_dim], as
    `nnx.MultiHeadAttention` does. The decoder runs a copy in `eval` mode and in the module's own dtype, with paged
    causal attention as `attention_fn`. `load` compares its logits with the module's own on at most 128 tokens.

    `lora` is the folder of a LoRA adapter in PEFT's format. It is merged into the weights when they are read.
    `adapters` maps names to such folders, which are not merged: each request names its adapter, and a batch may mix
    requests with different adapters.

    `dtype` is "auto", "bfloat16" or "float32"; "auto" is the dtype in which the weights are stored. `cache_dtype`, the
    dtype of cached keys and values, is one of these or 8 bits, "int8" or "fp8" (e4m3), with one scale per key and per
    value of each token and head; "auto" is the dtype of the loaded weights. A page has `page_size` tokens (16 on CPU,
    64 on GPU, 128 on TPU). `max_model_len` limits prompt plus generated tokens, at most the model's context length.
    `max_num_seqs` sequences are decoded per step. A sequence's tokens depend on this number, but not on which other
    sequences are in the batch. `max_resident_seqs` (default: `max_num_seqs`) sequences have cache pages at once; if
    there are more than `max_num_seqs`, each step decodes those of highest priority under the controller's rule.
    `num_pages` limits the cache. By default every resident sequence can reach `max_model_len`, or there are as many
    pages as fit in `memory_fraction` of the free memory. If pages run out, the scheduler swaps sequences to the host
    and back. `max_num_batched_tokens` limits the prompt tokens prefilled between two steps. They are prefilled in calls
    of `prefill_batch` tokens (on CPU 64, or 128 from 16 sequences on; elsewhere 512), rounded up to a multiple of the
    page size, at most `max_model_len`. `prefix_cache` reuses full pages for prompts with a common prefix; it does not
    apply to prompts under a prefill budget or `lazy_prefill`. Every `preempt_every` rounds (0: never) the engine
    preempts a sequence without need, to test that its tokens do not change. `replicas` share one queue, each with all
    of the sizes above. They use the machine's devices in turn, each with a copy of the weights. Replicas on the same
    device overlap host work with device work. `tensor_parallel` splits the model over that many devices, and must
    divide its heads, feed-forward widths and vocabulary; each replica then takes the next group of devices.

    `quantize` "int8" stores matrices, also those of a second model, in 8 bits with one scale per output, and rounds
    their inputs to 8 bits (docs/models.md). Without it, weights that are stored quantised are decoded to `dtype`, of
    which "auto" is then bfloat16.

    `control` is a preset's name or a Controller (see `presets.preset`). `draft` enables speculative decoding, which
    does not change the tokens. "lookup" drafts up to `draft_tokens` (8) tokens from earlier tokens of the sequence, and
    one step verifies them. "self" drafts with the model itself, which then reads at most a share `draft_share` (0.08)
    of the blocks: those with most of the attention mass of the last token. Any other `draft` names a smaller model
    with the same tokenizer ("bundled-small" for the bundled one). "lookup+self", or "lookup+" and a model, uses the
    second drafter if the lookup finds no match. `draft_length` sets how many tokens are drafted: "acceptance"
    (default) by acceptance rate and measured step times, and for "self" also by the sequence's length; "entropy" by
    the model's certainty; or "fixed". `draft` is not supported with a controller under which a token decides what the
    next token reads ("paper", "guarded") or two models alternate; a draft model is not supported with `cache_budget`.
    `small` names a model with the same tokenizer, which alternates with this one under "ead", "ead_guarded" or another
    control with a switch; other controls do not accept it. With `lazy_prefill` only the small model reads the prompt
    at first; the large model reads it when its first turn comes. With `audit`, traces report how many of one model's
    tokens were also the most likely under the other, and under a prefill budget how much attention mass was kept.
    With `trace_reads` they report the blocks that each layer and KV head read (`TokenTrace.reads`).
    `cache_budget` is a number of tokens. Under the default `cache_policy`, "latent", a sequence keeps the cache entries
    that its last queries attend to most, once 16 tokens are decoded and again after every further quarter of the
    budget. Other policies rank differently; "snapkv" compresses once, after prefill, and keeps all tokens decoded
    later. A `Compression` instead of the number sets more (see `control.compression`).
    `experts` sets how many experts of a mixture a decoded token uses: "top_k", the trained number (default); "mass",
    the fewest whose gate probability sums to `expert_share` (0.9); "entropy", likewise with a share that grows with the
    entropies of sequence and gate, from `expert_share` (0.5) up; or an `ExpertRule` (see `control.experts`). Prompts
    use the trained number.
    `calibration` "auto" uses the head sensitivities found in the model folder's calibration.json, in the user's cache,
    or in this package. If a control requires them, as "adaptive" does, and none are found, `load` measures them first,
    reports the time to `progress`, and saves them in the user's cache. With "none" all heads have equal weight.
    `compilation_cache` is the folder of compiled programs; "auto" is et_jax/programs in XDG_CACHE_HOME or ~/.cache, and
    None disables it. If the folder of "auto" is not writable, `progress` receives a message; programs stay in memory.

    Raises UsageError, one sentence, for a name, a file, a folder or a size that cannot work, and for settings that are
    not supported together (all in `decode.compat`).
    """
    given = locals()
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {values.shown(progress)}; it must be a function of one text.")
    platform()  # before anything asks for a device
    report = progress or (lambda _: None)
    own = given.keys() - {"progress", "config", "tokenizer"}
    if is_module(name):
        settings = EngineConfig(**{key: given[key] for key in own} | {"name": type(name).__name__})
        found = opened_module(settings, name, config, tokenizer, report)
    else:
        settings = EngineConfig(**{key: given[key] for key in own})
        if config is not None or tokenizer is not None:
            raise UsageError("config and tokenizer go with a module; a named model brings its own, so leave them out.")
        found = opened(settings, report)
    return Model(
        settings,
        config=found.config,
        weights=found.weights,
        others=found.others,
        tokenizer=found.tokenizer,
        plan=found.plan,
        remarks=found.remarks,
        progress=report,
    )
