"""Models on the Hugging Face hub: fetched into the hub's own cache, or found there."""

import errno
import json
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from turnkv.errors import ModelFilesError
from turnkv.models.store import Progress

_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")


def fetch(name: str, progress: Progress) -> Path:
    """Return the hub's snapshot of a model: the one on disk where it is whole, so that answers stay repeatable.

    Raises:
        ModelFilesError: a typo, no network, no access, or no safetensors.
    """
    try:
        try:
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES), local_files_only=True))
        except FileNotFoundError:
            path = None
        if path is None or not _holds_weights(path):
            progress(f"fetching {name} from the Hugging Face hub")
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES)))
    # The hub's errors have no common base below Exception (HTTP, cache, validation, xet).
    except Exception as error:
        raise _hub_error(name, error) from error
    if not _holds_weights(path):
        raise ModelFilesError(f"{name} on the hub holds no config.json with safetensors weights; use another model")
    return path


def _holds_weights(folder: Path) -> bool:
    """Whether a snapshot is whole: configuration and all shards of the weights."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _hub_error(name: str, error: Exception) -> ModelFilesError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return ModelFilesError(
                f"the disk that holds {constants.HF_HUB_CACHE} is full; free some, or set HF_HOME elsewhere"
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, errors.HFValidationError):
        return ModelFilesError(f"{name!r} is neither a folder nor a hub name; check it for a typo")
    if isinstance(error, errors.GatedRepoError):
        return ModelFilesError(f"{name} is gated: accept its terms on the hub and log in with `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelFilesError(
            f"{name} is no folder here, and the hub has no such model (or it is private); check the name for a typo"
        )
    return ModelFilesError(
        f"{name} is no folder here and could not be fetched from the hub ({_first_line(error)}); "
        "check the name for a typo and the network, or unset HF_HUB_OFFLINE"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
