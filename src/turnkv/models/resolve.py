"""From what the user typed to a folder that transformers loads."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from turnkv.errors import ModelFilesError
from turnkv.models.default import NAME, default_recipe
from turnkv.models.store import Progress, Recipe, Workshop, prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder with config.json, weights and tokenizer."""

    path: Path
    name: str
    """What to call the model: short, without the place."""


def resolve_model(name: str | None, *, progress: Progress) -> ModelFolder:
    """Find a model's folder; fetch or convert it first where needed.

    `name` is None or `default`, a folder, a path that ends in .gguf, or a hub name such as `org/model`.
    `progress` receives one line per step of work, and nothing when the folder is ready.

    Raises:
        ModelFilesError: there is no such model, or it could not be fetched, converted or written.
    """
    if name is None or name == "default":
        return ModelFolder(path=prepare(default_recipe(), progress), name=NAME)
    if not name.strip():
        raise ModelFilesError("the model's name is empty; give a folder, a .gguf file, a hub name, or `default`")
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return ModelFolder(path=prepare(_gguf_recipe(path), progress), name=path.stem)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise ModelFilesError(f"{name} is a file but no .gguf; give the folder that holds config.json")
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 or name.endswith(("/", os.sep)):
        raise ModelFilesError(f"{name}: there is no such folder; check the path for a typo")
    from turnkv.models.hub import fetch  # noqa: PLC0415 (it imports an HTTP client; the default model needs none)

    return ModelFolder(path=fetch(name, progress), name=name)


def _folder(path: Path) -> ModelFolder:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        remedy = f"give the file {ggufs[0]} itself" if ggufs else "give the folder that holds config.json and weights"
        raise ModelFilesError(f"{path} holds no config.json, so it is no model folder; {remedy}")
    return ModelFolder(path=path, name=path.resolve().name)


def _gguf_recipe(path: Path) -> Recipe:
    from turnkv.models.convert import convert_gguf  # noqa: PLC0415 (it imports numpy and gguf)

    try:
        stat = path.stat()
    except OSError as error:
        raise ModelFilesError(f"{path}: {error.strerror}; check the path for a typo") from error
    if not path.is_file():
        raise ModelFilesError(f"{path} is a folder; give the .gguf file itself")
    source = path.resolve()
    identity = f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}"

    def build(workshop: Workshop) -> None:
        convert_gguf(source, workshop)

    return Recipe(name=path.stem, digest=hashlib.sha256(identity.encode()).hexdigest(), build=build)
