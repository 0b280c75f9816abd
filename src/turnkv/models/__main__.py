"""`python -m turnkv.models` prepares the default model: a line per step of work, silence when it is ready."""

import sys

from turnkv.errors import TurnKVError
from turnkv.models.resolve import resolve_model


def main() -> int:
    """Prepare the default model and return the exit code."""
    try:
        resolve_model(None, progress=_say)
    except TurnKVError as error:
        sys.stderr.write(f"turnkv: {error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
