"""Schemas of the JSON files of a model folder. Files may be malicious: they are validated before use.

Unlisted fields are ignored. Every refusal is a `UsageError` that names file and field.
"""

import json
import os
import re
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from et_jax.errors import UsageError
from et_jax.io.values import excerpt

T = TypeVar("T")

MAX_JSON_BYTES = 10 * 2**20
MAX_INDEX_BYTES = 32 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20  # of a tokenizer.json or tokenizer.model; published ones reach 35 MB
MAX_TEMPLATE_BYTES = 2**20
MAX_LAYERS = 1024  # published models have up to about 130
MAX_MODULES = 2**14  # that an adapter may name
MAX_EOS_IDS = 8  # end tokens of a model, kept besides a request's own stop ids
FETCH = "take the file from the model's repository again"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of half a character, or of one half of a pair
_SHOWN = 60  # the most characters of a value in a message
_REPR = reprlib.Repr(maxstring=_SHOWN, maxother=_SHOWN)

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


def is_there(file: Path) -> bool:
    """Return whether anything has that name, readable or not."""
    return os.path.lexists(file)


def check_regular(file: Path, most: int | None = None) -> int:
    """Return the size of a file in bytes.

    Raises UsageError unless it is a regular one of at most `most` bytes: reading a pipe would block.
    """
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{file} is not a regular file; put the file itself in its place.")
    if most is not None and found.st_size > most:
        raise UsageError(f"{file} has {found.st_size} bytes and at most {most} are read; {FETCH}.")
    return found.st_size


def read_bytes(file: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a file. Raises UsageError if it is absent, larger than `most`, or not a regular file."""
    size = check_regular(file, most)
    try:
        with file.open("rb") as reader:
            return reader.read(size)  # allocated at once
    except OSError as error:
        raise _unreadable(file, error) from error


def read_text(file: Path, most: int) -> str:
    """Return the UTF-8 text of a file, see `read_bytes`."""
    try:
        return read_bytes(file, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start + 1}); {FETCH}.") from error


def read_json(file: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError for anything else, and for a duplicate field."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            [(double, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise UsageError(f"{file} holds {_shortened(double)} twice; {FETCH}.")
        return values

    def refuse(name: str) -> None:
        raise UsageError(f"{file} holds {name}, which is no number in JSON; {FETCH}.")

    try:
        text = read_bytes(file, most).decode("utf-8")
        values = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
        if _SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except UsageError:
        raise
    except UnicodeEncodeError as error:
        raise UsageError(f"{file} is not readable JSON (half of a surrogate pair); fetch the file again.") from error
    except RecursionError as error:
        raise UsageError(f"{file} is not readable JSON (nested too deep); fetch the file again.") from error
    except ValueError as error:
        reason = str(error).split("; use sys.")[0]
        raise UsageError(f"{file} is not readable JSON ({reason}); fetch the file again.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} is not a JSON object; fetch the file again.")
    return values


def read_optional(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one without such a file."""
    return read_json(file) if is_there(file) else {}


def checked(values: dict[str, Any], kind: type[T], source: str | Path, remedy: str = FETCH) -> T:
    """Return `values` as the schema `kind`. Raises UsageError naming the field that is wrong."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except UnicodeEncodeError as error:
        raise UsageError(f"{source} holds half of a surrogate pair, which is no character; {remedy}.") from error
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        absent = re.fullmatch(r"Object missing required field `(\w+)`", reason)
        path = ".".join(part for part in [*re.findall(r"\.(\w+)", place), *(absent.groups() if absent else ())])
        value = _value(values, path)
        reason = reason[0].lower() + reason[1:].replace("`", "")
        said = "missing" if value is None else f"{_shortened(value)} ({reason})"
        raise UsageError(f"{source}: the field {path} is {said}; {remedy}.") from error


def _value(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else values
    return values


def named(text: str) -> str:
    """Return a name for a message: a word unchanged, other text quoted and cut."""
    return text if text.isidentifier() and len(text) <= _SHOWN else _shortened(text)


def _shortened(value: Any) -> str:
    return excerpt(_REPR.repr(value), _SHOWN)


def _unreadable(file: Path, error: Exception) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{file.parent} has no {file.name}; name a folder that holds a Hugging Face model.")
    reason = (error.strerror if isinstance(error, OSError) else None) or "the name is invalid"
    return UsageError(f"{file} cannot be read ({reason}); correct its permissions or fetch it again.")
