"""Schemas of the JSON files of a model folder, which `json_files` validates. Unlisted fields are ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_LAYERS = 1024  # published models have up to about 130
MAX_MODULES = 2**14  # that an adapter may name
MAX_EOS_IDS = 8  # end tokens of a model, kept besides a request's own stop ids

Size = Annotated[int, Meta(ge=1, le=2**22)]
Length = Annotated[int, Meta(ge=1, le=2**30)]
Id = Annotated[int, Meta(ge=0, lt=2**22)]  # in a tokenizer's own vocabulary
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]


class KindFile(msgspec.Struct):
    """The part of config.json that names the family; the rest is read if the family is known."""

    architectures: list[str] | None = None
    model_type: str | None = None


class RopeFile(msgspec.Struct):
    """Rotary settings of config.json, in either spelling."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Meta(gt=1, le=1e12)] | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Length | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    attention_factor: Factor | None = None
    truncate: bool | None = None
    short_factor: list[Factor] | None = None
    long_factor: list[Factor] | None = None
    partial_rotary_factor: float | None = None


class ConfigFile(KindFile, kw_only=True):
    """The fields of config.json that are read."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Meta(ge=2, multiple_of=2, le=2**14)] | None = None
    max_position_embeddings: Length
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=1, le=1e12)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    rope_local_base_freq: Annotated[float, Meta(gt=1, le=1e12)] | None = None
    original_max_position_embeddings: Length | None = None
    no_rope_layers: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Size | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    query_pre_attn_scalar: Factor | None = None
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    use_bidirectional_attention: bool | None = None
    attention_multiplier: Factor | None = None
    embedding_multiplier: Factor | None = None
    residual_multiplier: Factor | None = None
    logits_scaling: Factor | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: Any = None
    swiglu_alpha: Factor | None = None
    swiglu_limit: Factor | None = None
    sliding_window: Annotated[int, Meta(ge=0, le=2**30)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0, le=2**22)] | None = None
    sliding_window_pattern: Size | None = None
    layer_types: list[str] | None = None
    qkv_bias: bool | None = None
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Annotated[int, Meta(ge=0, le=2**22)] | None = None
    mlp_only_layers: list[Annotated[int, Meta(ge=0, le=2**22)]] | None = None
    tie_word_embeddings: bool | None = None
    bos_token_id: Token | None = None
    eos_token_id: Token | list[Token] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class SchemeFile(msgspec.Struct):
    """How compressed-tensors stores the weights of a group of layers."""

    num_bits: Size
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[Size] | None = None


class GroupFile(msgspec.Struct):
    """A group of layers with the same compressed-tensors scheme."""

    weights: SchemeFile | None = None


class QuantizationFile(msgspec.Struct):
    """The quantization_config of config.json, for all methods."""

    quant_method: str | None = None
    format: str | None = None
    config_groups: dict[str, GroupFile] | None = None
    sparsity_config: dict[str, Any] | None = None
    weight_block_size: list[Size] | None = None
    bits: Size | None = None
    w_bit: Size | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    zero_point: bool | None = None


class GenerationFile(msgspec.Struct):
    """generation_config.json, and the fields of config.json that a tokenizer needs."""

    bos_token_id: Token | None = None
    eos_token_id: Token | list[Token] | None = None
    vocab_size: Size | None = None


class IndexFile(msgspec.Struct):
    """model.safetensors.index.json: the file of every tensor."""

    weight_map: Annotated[dict[str, Annotated[str, Meta(min_length=1, max_length=255)]], Meta(min_length=1)]


class TokenFile(msgspec.Struct):
    """A special token written out."""

    content: str


class TemplateFile(msgspec.Struct):
    """A chat template with a name."""

    name: str
    template: str


class NamesFile(msgspec.Struct):
    """special_tokens_map.json: the special tokens that have a name."""

    bos_token: str | TokenFile | None = None
    eos_token: str | TokenFile | None = None
    unk_token: str | TokenFile | None = None
    sep_token: str | TokenFile | None = None
    pad_token: str | TokenFile | None = None
    cls_token: str | TokenFile | None = None
    mask_token: str | TokenFile | None = None


class SettingsFile(NamesFile):
    """tokenizer_config.json."""

    add_bos_token: bool | None = None
    legacy: bool | None = None
    added_tokens_decoder: dict[Token, TokenFile] | None = None
    chat_template: str | list[TemplateFile] | None = None


class VocabularyFile(msgspec.Struct):
    """The model of a tokenizer.json: the library allocates every id up to the highest."""

    vocab: dict[str, Id] | list[Any] | None = None


class AddedTokenFile(msgspec.Struct):
    """An added token of a tokenizer.json."""

    id: Id


class TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that are validated before the library reads it."""

    model: VocabularyFile | None = None
    added_tokens: list[AddedTokenFile] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class GgufTokenizerFile(msgspec.Struct):
    """The values of a GGUF file whose keys begin with `tokenizer.ggml.`."""

    tokens: list[str]
    model: str | None = None
    pre: str | None = None
    token_type: list[int] | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    add_bos_token: bool | None = None
    add_space_prefix: bool | None = None
    bos_token_id: Id | None = None
    eos_token_id: Id | None = None
    eot_token_id: Id | None = None
    eom_token_id: Id | None = None


class AdapterFile(msgspec.Struct):
    """adapter_config.json of PEFT, as far as its numbers and modules go."""

    peft_type: str
    r: Size
    lora_alpha: Annotated[float, Meta(ge=0, le=1e6)]
    target_modules: Annotated[list[str], Meta(max_length=MAX_MODULES)] | str
    exclude_modules: Annotated[list[str], Meta(max_length=MAX_MODULES)] | str | None = None
    use_rslora: bool = False
    rank_pattern: Annotated[dict[str, Size], Meta(max_length=MAX_MODULES)] | None = None
    alpha_pattern: Annotated[dict[str, Annotated[float, Meta(ge=0, le=1e6)]], Meta(max_length=MAX_MODULES)] | None = (
        None
    )
    bias: str = "none"
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None


class PartFile(msgspec.Struct):
    """A file of a data set."""

    filename: Annotated[str, Meta(min_length=1, max_length=255)]


class DatasetFile(msgspec.Struct):
    """state.json of a data set that was saved to a folder."""

    _data_files: Annotated[list[PartFile], Meta(min_length=1)]


class CalibrationFile(msgspec.Struct):
    """calibration.json."""

    temperature: Factor
    sensitivity: list[list[list[Annotated[float, Meta(ge=0, le=1e12)]]]] | None = None
