"""Where a model lies: inside a package, in a folder or a file of one's own, or in the local copy of one on the hub."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.gguf import is_gguf
from et_jax.io.json_files import named
from et_jax.models.checkpoint import read_config
from et_jax.models.local import local_model

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PATIENCE = 5.0  # seconds that the hub has to answer at all


def resolve(name: str | Path, check: Callable[[Path], object] | None = None, *, config_only: bool = False) -> Path:
    """Return the folder or GGUF file of a model: that of `local_model`, or the local copy of `owner/model`.

    From the hub config.json comes first: `check`, by default `read_config`, sees its folder before any
    weight is downloaded, and with `config_only` nothing else is. A hub that cannot be reached is asked once;
    then what the cache holds serves. The token and the cache are the hub library's own (HF_TOKEN, HF_HOME).
    Raises UsageError where there is no such model.
    """
    if (found := local_model(name)) is not None:
        return found
    try:
        folder = Path(name).expanduser()
        if is_gguf(folder) and not folder.exists():
            raise UsageError(f"{name} does not exist; check the spelling.")
        if folder.exists():
            raise UsageError(
                f"{name} is a file; name a GGUF file, or the folder that holds config.json and the safetensors."
            )
    except (OSError, RuntimeError) as error:  # too long a name, a forbidden place, a home of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{named(str(name))} cannot be looked up ({reason}); check the spelling.") from error
    given = str(name) if len(str(name)) < 200 else named(str(name))
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        raise UsageError(f"{given} is neither a folder nor a hub name such as owner/model; check the spelling.")

    from huggingface_hub import errors, hf_hub_download, hf_hub_url, snapshot_download

    repository = str(name)
    try:
        kept = not is_reached(hf_hub_url(repository, "config.json"))
        config = hf_hub_download(repository, "config.json", local_files_only=kept)
        (check or read_config)(Path(config).parent)
        if config_only:
            return Path(config).parent
        return Path(snapshot_download(repository, allow_patterns=list(HUB_FILES), local_files_only=kept))
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{name}"
        raise UsageError(f"{name} is gated: accept its terms at {page} and set HF_TOKEN to your token.") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{name} is neither a folder here nor a model on the hub; check the spelling, "
            "or set HF_TOKEN if the model is private."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UsageError(
            f"{name} is not a folder here and the hub cannot be reached; go online, or name a folder holding a model."
        ) from error
    except errors.EntryNotFoundError as error:
        raise UsageError(f"{name} has no config.json on the hub; choose a model in Hugging Face format.") from error
    except (OSError, http_error()) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{name} could not be downloaded ({reason}); try again, or name a local folder.") from error


def http_error() -> Any:
    """Return the class of all errors of the HTTP library under the hub's: an interrupted download raises no OSError."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__bases__[0]  # not always that of the same library


def is_reached(url: str) -> bool:
    """Return whether the hub answers for a file, whatever it says. The library itself tries for half a minute."""
    from huggingface_hub import errors, get_hf_file_metadata

    try:
        get_hf_file_metadata(url, timeout=_PATIENCE)
    except errors.HfHubHTTPError:
        return True
    except (http_error(), errors.OfflineModeIsEnabled):
        return False
    return True
