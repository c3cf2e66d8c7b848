"""The engine's door: loads a model ready to serve."""

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
    tell_reads: bool = False,
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

    Or `name` is a model itself, a `flax.nnx.Module`: called as `module(tokens, positions)`, both [batch, length], it
    returns logits [batch, length, vocabulary]. It comes with a `config` and a `tokenizer`: a tokenizer.json, a folder
    with one, a `tokenizers.Tokenizer`, or that of another model. Its attention layers call an attribute `attention_fn`
    with queries, keys and values [batch, length, heads, head_dim], as `nnx.MultiHeadAttention` does. In its place the
    decoder puts paged causal attention, on a copy in `eval` mode, and otherwise runs the module as it is, in the dtype
    that it has. That this gives what the module computes by itself is checked here, on at most 128 tokens.

    `lora` is the folder of a LoRA adapter, as PEFT saves it, that is merged into the weights as they are read.
    `adapters` maps names to such folders, which stay beside the weights: a request names the one it is served with, and
    requests of several are served in one batch.

    `dtype` is "auto", "bfloat16" or "float32", and so is `cache_dtype`, in which keys and values are kept: "auto" is
    what the weights are stored in, and for the cache what they have here. A cache may be kept in 8 bits too, "int8" or
    "fp8" (e4m3), with a scale for the key and for the value of each token and head. `page_size` tokens share a page (16
    on CPU, 64 on GPU, 128 on TPU). `max_model_len` caps prompt plus text, at most what the model was made for.
    `max_num_seqs` sequences are decoded together, always as that many rows: the same number gives the
    same text, alone or in company. `max_resident_seqs` of them, as many by default, are in the cache at
    once; with more, every step serves those of highest priority under the controller's rule. `num_pages`
    bounds the cache; by default every resident sequence can reach `max_model_len`, or as many as
    `memory_fraction` of the free memory holds. Where pages run short, sequences are swapped to the host
    and back. `max_num_batched_tokens` bounds the prompt tokens prefilled between two steps, of one prompt or
    several in calls of `prefill_batch` (on CPU 64, 128 from 16 sequences on, else 512), rounded up to whole pages, at
    most `max_model_len`. `prefix_cache` keeps full pages of prompts for prompts that begin alike, where they are read
    whole by a model that reads all of them. Every `preempt_every` rounds (0: never) a sequence is
    swapped out without need, to prove that no text changes. `replicas` serve one queue side by side, each of
    all these sizes: on the machine's devices in turn, with the weights on each, or on one device, where the
    host's work for one and the device's for another overlap. `tensor_parallel` splits the model over so many devices,
    by heads, feed-forward widths and vocabulary, each of which it must divide; replicas then take the next devices.

    With `quantize` "int8" matrices, those of a model beside it too, are held in 8 bits with a scale for each output,
    and what they are multiplied with is rounded to 8 bits as well (docs/models.md). Without it, weights that are
    stored quantised are decoded to `dtype`, of which "auto" is then bfloat16.

    `control` is a preset's name or a Controller (see `presets.preset`). `draft` "lookup" guesses up to `draft_tokens`
    (8) of a text's next tokens from what it read so before, and verifies them in one step: the text is the one it would
    be without. "self" has the model write them, reading few blocks of a long text: those that held the mass last, a
    `draft_share` of them at most (0.08). Any other `draft` names a model that writes them, smaller and with the same
    tokenizer: "bundled-small" for the bundled one. "lookup+self", or "lookup+" and a model, has those draft where a
    lookup has no guess. `draft_length` decides how many: "acceptance" (the usual), by how many were accepted so far and
    what steps take by the clock, and where the model drafts for itself by how long the text is; "entropy", by how
    certain the model is; or "fixed". Beside a controller by which one token decides what the next reads, such as
    "paper" and "guarded", or by which two models take turns, `draft` is refused, and a model's beside a `cache_budget`.
    `small` names a model of the same tokenizer that takes turns with this one under a control with a switch, "ead" or
    "ead_guarded", and goes with no other. With `lazy_prefill` it reads prompts alone, and the model when it first
    speaks. With `audit` traces tell how many of the other's words were the likeliest to the one that catches up with
    them, under a prefill budget how much of the attention was kept. With `tell_reads` they tell the blocks that each
    layer and KV head read (`TokenTrace.reads`).
    With a `cache_budget` of so many tokens a sequence keeps of its cache what its last queries attend to the most, once
    it has decoded 16 tokens and again whenever a quarter of the budget has come: "latent", the usual `cache_policy`.
    Others choose in other ways; "snapkv" does it once, when the prompt is read, and keeps what is decoded after that. A
    `Compression` in the place of the number has settings of its own (see `control.compression`).
    `experts` says to how many experts of a mixture a decoded token goes: "top_k", to as many as trained, as without it;
    "mass", to as few as hold `expert_share` (0.9) of the gate's probability; "entropy", likewise by a share that grows
    with the sequence's entropy and the gate's, `expert_share` (0.5) being the least; or an `ExpertRule` (see
    `control.experts`). Prompts are read as trained.
    `calibration` "auto" takes what was measured of the model: in its folder's calibration.json, in the user's cache, or
    in this package. Where a control goes by the sensitivity of heads, as "adaptive" does, and none was measured, it is
    measured first and kept in the cache; `progress` receives how long that takes. With "none" all heads count alike.
    `compilation_cache` is the folder that keeps compiled programs between runs; "auto" is et_jax/programs in
    XDG_CACHE_HOME or ~/.cache, and None keeps none. Where the folder of "auto" cannot be written `progress` is told,
    and they are kept in memory only.

    Raises UsageError, one sentence, for a name, a file, a folder or a size that cannot work, and for settings that do
    not go together (`decode.compat` has them all).
    """
    given = locals()
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {values.shown(progress)}; it must be a function of one text.")
    platform()  # before anything asks for a device
    tell = progress or (lambda _: None)
    own = given.keys() - {"progress", "config", "tokenizer"}
    if is_module(name):
        settings = EngineConfig(**{key: given[key] for key in own} | {"name": type(name).__name__})
        found = opened_module(settings, name, config, tokenizer, tell)
    else:
        settings = EngineConfig(**{key: given[key] for key in own})
        if config is not None or tokenizer is not None:
            raise UsageError("config and tokenizer go with a module; a named model brings its own, so leave them out.")
        found = opened(settings, tell)
    return Model(
        settings,
        config=found.config,
        weights=found.weights,
        others=found.others,
        tokenizer=found.tokenizer,
        plan=found.plan,
        remarks=found.remarks,
        progress=tell,
    )
