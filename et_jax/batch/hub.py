"""An input on the hub: `hf://datasets/OWNER/NAME[@REVISION]/FILE`, downloaded into the hub library's cache."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from et_jax.errors import UsageError
from et_jax.io.json_files import named
from et_jax.models.hub import http_error, is_reached

_NAME = r"[\w-][\w.-]*"
_REVISION = r"refs/pr/\d+|refs/convert/\w+|[^/@]+"  # other names with a slash spell it %2F
_ADDRESS = re.compile(f"hf://datasets/({_NAME}/{_NAME})(?:@({_REVISION}))?/(.+)", re.DOTALL)


def download(address: str) -> tuple[Path, str]:
    """Return the local copy of a data set's file on the hub, and the commit that it is of.

    A hub that cannot be reached is asked once; then what the cache holds serves. The token and the cache are the hub
    library's own (HF_TOKEN, HF_HOME). Raises UsageError for a malformed address, and if the file cannot be downloaded.
    """
    given = address if len(address) < 200 else named(address)
    found = _ADDRESS.fullmatch(address)
    parts = [] if found is None else found[3].split("/")
    if found is None or not {"", ".", ".."}.isdisjoint(parts) or "\\" in address or not address.isprintable():
        raise UsageError(
            f"{given} names no file on the hub; write hf://datasets/OWNER/NAME/FILE or .../NAME@REVISION/FILE."
        )
    try:
        from huggingface_hub import errors, hf_hub_download, hf_hub_url
    except ImportError as error:
        raise UsageError(f"{given} needs huggingface_hub; install it with: pip install huggingface_hub.") from error

    repository, name = found[1], found[3]
    revision = None if found[2] is None else unquote(found[2])
    at: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    try:
        reached = is_reached(hf_hub_url(repository, name, **at))
        path = Path(hf_hub_download(repository, name, local_files_only=not reached, **at))
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/datasets/{repository}"
        raise UsageError(f"{given} is gated: accept its terms at {page} and set HF_TOKEN to your token.") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{given} is of no data set on the hub; check the spelling, or set HF_TOKEN if the data set is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"{given} names a revision that the data set does not have; correct it.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UsageError(
            f"{given} was not downloaded before and the hub cannot be reached; go online, or name a local file."
        ) from error
    except errors.EntryNotFoundError as error:
        raise UsageError(f"{given} names a file that the data set does not have; check the spelling.") from error
    except (OSError, ValueError, http_error()) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{given} could not be downloaded ({reason}); try again, or name a local file.") from error
    return path, path.parents[len(parts) - 1].name
