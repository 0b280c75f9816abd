"""The cache folder of prepared models: built aside, complete or absent, one builder at a time."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from turnkv.errors import ModelFilesError

Progress = Callable[[str], None]
"""Receives one line per step of work; it is not called when there is nothing to do."""

MANIFEST = "turnkv.json"
CONVERTER_VERSION = 1
"""Raised when a converter writes something else than before, so that folders made by an older one are made again."""


def cache_folder() -> Path:
    """Where turnkv keeps what it can make again; XDG_CACHE_HOME moves it."""
    return Path(platformdirs.user_cache_dir("turnkv"))


@dataclass(slots=True, kw_only=True)
class Workshop:
    """What a builder may use: the folder to fill, the line to the user, and the room it asks for."""

    folder: Path
    """Empty at the start; what lies in it at the end is the prepared model."""

    say: Progress

    needed_bytes: int = field(default=0, init=False)
    """Bytes asked for last; a message about a full disk names it."""

    def reserve(self, needed_bytes: int) -> None:
        """State the bytes about to be written.

        Raises:
            ModelFilesError: the disk has less room. Nothing is written.
        """
        self.needed_bytes = needed_bytes
        if shutil.disk_usage(self.folder).free < needed_bytes:
            raise _no_room(self.folder, needed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one prepared model comes about."""

    name: str
    """Readable part of the folder's name."""

    digest: str
    """Identifies the source; another source gets another folder."""

    build: Callable[[Workshop], None]

    @property
    def target(self) -> Path:
        """The folder of the prepared model."""
        return cache_folder() / "models" / f"{self.name}-{self.digest[:12]}"


def prepare(recipe: Recipe, say: Progress) -> Path:
    """Return the recipe's complete folder, building it first where it is absent, outdated or damaged.

    Safe against kills and other processes: the folder appears by one rename, under a lock.

    Raises:
        ModelFilesError: it could not be built. Nothing half-made is left behind.
    """
    target = recipe.target
    if _fault(target, recipe) is None:
        return target
    workshop = Workshop(folder=target.with_name(f".{target.name}.unfinished"), say=say)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target, say):
            fault = _fault(target, recipe)
            if fault is not None:
                _clear_leftovers(target, workshop, fault)
                _build(recipe, workshop)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(target.parent, workshop.needed_bytes) from error
        raise ModelFilesError(
            f"{target}: {error.strerror or error}; make the folder writable, or set XDG_CACHE_HOME to one that is"
        ) from error
    return target


def _fault(target: Path, recipe: Recipe) -> str | None:
    """What is wrong with the folder, by manifest and sizes alone; None if it is complete."""
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        if manifest["source"] != recipe.digest or manifest["converter"] != CONVERTER_VERSION:
            return "was made by another version of turnkv"
        for name, size in manifest["files"].items():
            found = (target / name).stat().st_size
            if found != size:
                return f"is damaged ({name} has {found} bytes instead of {size})"
    except FileNotFoundError as error:
        return f"is damaged ({Path(error.filename).name} is missing)"
    except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError):
        return f"is damaged ({MANIFEST} is not readable)"
    return None


def _clear_leftovers(target: Path, workshop: Workshop, fault: str) -> None:
    if target.is_dir():
        workshop.say(f"{target} {fault}; making it again")
        shutil.rmtree(target)
    elif target.exists():
        workshop.say(f"{target} is not a folder; making it again")
        target.unlink()
    if workshop.folder.exists():
        workshop.say(f"a run was stopped while it prepared {target.name}; removing what it left and starting again")
        shutil.rmtree(workshop.folder)


def _build(recipe: Recipe, workshop: Workshop) -> None:
    folder, target = workshop.folder, recipe.target
    try:
        folder.mkdir()
        recipe.build(workshop)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest = {
            "source": recipe.digest,
            "converter": CONVERTER_VERSION,
            "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in (*files, folder / MANIFEST, folder):
            _sync(path)
        folder.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _alone(target: Path, say: Progress) -> Iterator[None]:
    """Hold the target's lock; a second process waits and says so."""
    from filelock import FileLock, Timeout  # noqa: PLC0415 (it imports asyncio; a ready model needs no lock)

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process prepares {target.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows opens no folders, and needs no sync of them
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_room(folder: Path, needed_bytes: int) -> ModelFilesError:
    need = f"about {needed_bytes:,} bytes are needed" if needed_bytes else "there is no room for a single file"
    return ModelFilesError(
        f"the disk that holds {folder} is full: {need} there; free some, or set XDG_CACHE_HOME to a larger disk"
    )
