"""A tokenizer from the files of a model's folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.gguf import is_gguf
from et_jax.io.json_files import MAX_TEMPLATE_BYTES, checked, is_there, read_optional, read_text
from et_jax.io.schema import MAX_EOS_IDS, GenerationFile, NamesFile, SettingsFile
from et_jax.io.values import shown
from et_jax.text.backends import JsonBackend, SentencePieceBackend
from et_jax.text.chat import Template
from et_jax.text.gguf import gguf_tokenizer
from et_jax.text.tokenizer import Tokenizer

_LEAST_SHARE = 0.5  # of a model's vocabulary that its tokenizer names; the rest is padding


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer in `folder`: its tokenizer.json, or else its tokenizer.model; or that of a GGUF file.

    Raises UsageError if there is neither, a file cannot be read or has invalid values, or the tokenizer
    does not match the vocabulary in config.json.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    places = {name: folder / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map")}
    values = {name: read_optional(place) for name, place in places.items()}
    settings = checked(values["tokenizer_config"], SettingsFile, places["tokenizer_config"])
    checked(values["special_tokens_map"], NamesFile, places["special_tokens_map"])
    config, generation = (
        checked(read_optional(folder / name), GenerationFile, folder / name)
        for name in ("config.json", "generation_config.json")
    )
    if is_there(folder / "tokenizer.json"):
        backend = JsonBackend(folder / "tokenizer.json")
        _check_size(folder / "tokenizer.json", backend.base_size, config.vocab_size)
    elif is_there(folder / "tokenizer.model"):
        backend = SentencePieceBackend(folder / "tokenizer.model", settings.legacy is not False)
        if any(id >= backend.base_size for id in settings.added_tokens_decoder or {}):
            raise UsageError(f"{folder}/tokenizer.model lacks tokens that were added to it; fetch tokenizer.json too.")
        _check_size(folder / "tokenizer.model", backend.base_size, config.vocab_size)
    else:
        raise UsageError(f"{folder} has neither tokenizer.json nor tokenizer.model; fetch the tokenizer too.")

    tokens = _special_tokens(values["special_tokens_map"]) | _special_tokens(values["tokenizer_config"])
    bos_id = backend.id_of(tokens.get("bos_token", "<s>"))
    eos_ids = {
        *_as_list(config.eos_token_id),
        *_as_list(generation.eos_token_id),
        *_as_list(backend.id_of(tokens.get("eos_token", "</s>"))),
    }
    if len(eos_ids) > MAX_EOS_IDS:
        raise UsageError(
            f"{folder} names {len(eos_ids)} end tokens and at most {MAX_EOS_IDS} are supported; shorten eos_token_id "
            "in its generation_config.json."
        )
    template = _chat_template(folder, settings)
    return Tokenizer(
        backend=backend,
        bos_id=config.bos_token_id if bos_id is None else bos_id,
        eos_ids=tuple(sorted(eos_ids)),
        add_bos=settings.add_bos_token,
        template=Template(template, tokens) if template else None,
        source=str(folder),
    )


def as_tokenizer(given: Any, bos_id: int | None, eos_ids: tuple[int, ...] | None) -> Tokenizer:
    """Return a caller's tokenizer, with other beginning and end tokens unless those are None.

    It is a `Tokenizer`, one of the `tokenizers` library, a tokenizer.json, or a folder for `load_tokenizer`. The
    second and third do not name their end tokens. Raises UsageError for anything else, and for too many.
    """
    if isinstance(given, str | Path) and Path(given).is_dir():
        found = load_tokenizer(given)
    elif isinstance(given, Tokenizer):
        found = given
    else:
        found = Tokenizer(
            backend=_json_backend(given), bos_id=None, eos_ids=(), add_bos=None, template=None, source="The tokenizer"
        )
    if eos_ids is not None and len(eos_ids) > MAX_EOS_IDS:
        raise UsageError(f"eos_token_ids names {len(eos_ids)} end tokens; at most {MAX_EOS_IDS} are supported.")
    return dataclasses.replace(
        found,
        bos_id=found.bos_id if bos_id is None else bos_id,
        eos_ids=found.eos_ids if eos_ids is None else tuple(sorted(set(eos_ids))),
    )


def _json_backend(given: Any) -> JsonBackend:
    import tokenizers

    if isinstance(given, str | Path):
        return JsonBackend(Path(given))
    if isinstance(given, tokenizers.Tokenizer):
        try:
            return JsonBackend(Path("The tokenizer"), given.to_str().encode())
        except Exception as error:  # the library raises nothing narrower for parts written in Python
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"tokenizer cannot be written down ({error}); build it from the library's parts."
            ) from error
    raise UsageError(
        f"tokenizer is {shown(given)}; give a tokenizer.json, a folder, a tokenizers.Tokenizer, or another model's."
    )


def _check_size(file: Path, size: int, vocab_size: int | None) -> None:
    """Raise UsageError unless a tokenizer of so many tokens, without added ones, can be that of the model.

    A model's vocabulary is often padded beyond its tokenizer. A prompt with an added token beyond the model's
    vocabulary is refused.
    """
    if vocab_size is not None and not vocab_size * _LEAST_SHARE <= size <= vocab_size:
        raise UsageError(f"{file} has {size} tokens and the model has {vocab_size}; use the model's own tokenizer.")


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have a name, `bos_token` and the like."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, settings: SettingsFile) -> str | None:
    """Return chat_template.jinja, or that of tokenizer_config.json: one template, or a list with a default."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        return read_text(file, MAX_TEMPLATE_BYTES)
    template = settings.chat_template
    if isinstance(template, list):
        return {entry.name: entry.template for entry in template}.get("default")
    return template
