"""Agent conversations made by others, beside the checkout: not part of the project, but CI must have them."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared_file(name: str) -> Path:
    """A file of the shared data; skips the test loudly where it is missing outside CI."""
    path = REPOSITORY.parent / "shared" / "data" / name
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing, and CI must have it")
        pytest.skip(f"NOT RUN: {path} is missing; the agent conversations are not part of the project")
    return path
