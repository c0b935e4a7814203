"""Downloads of model folders from the Hugging Face hub, or what is left of them in its local cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...ipc.errors import ModelError

_IGNORED_FILES = ["original/*", "consolidated*", "onnx/*"]  # second copies of the same weights


def download(
    model: str, revision: str | None, field_name: str, patterns: Sequence[str], allowed: str
) -> Path:
    """The local folder of a hub model's files that match a pattern. Raises ModelError."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), ignore_patterns=_IGNORED_FILES
        )
    except RepositoryNotFoundError as error:
        raise ModelError(field_name, model, f"not on the hub; expected {allowed}") from error
    except LocalEntryNotFoundError as error:
        reason = "not in the local cache, and the hub cannot be reached"
        raise ModelError(field_name, model, f"{reason}; expected {allowed}") from error
    except Exception as error:  # the hub client raises what its HTTP library does; to us it is all one
        reason = f"the hub answered: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise ModelError(field_name, model, f"{reason}; expected {allowed}") from error
    return Path(folder)
