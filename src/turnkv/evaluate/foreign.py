"""Other people's KV caches behind one small protocol, each in a process of its own.

They live in `.peers/caches` (`make peers`), since kvpress wants an older transformers than turnkv. Only the tokens go
there and the logits come back, so they are scored like turnkv's own.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from turnkv.errors import TurnKVError

ENVIRONMENT = Path(".peers/caches")
WORKER = Path(__file__).with_name("foreign_worker.py")

_NAMES = re.compile(
    r"hf:(dynamic|quanto-int4)|kvpress:(streaming_llm|snapkv|expected_attention|keydiff)@0?\.[0-9]*[1-9]"
)


class Held(Protocol):
    """A prefix in somebody's cache."""

    kv_bytes: int
    """Of KV, after compression."""

    def score(self, tokens: Sequence[int], num_scored: int) -> Tensor:
        """Logits [num_scored, V] float32 that predict the last of `tokens`, which follow the prefix."""
        ...


class ForeignCache(Protocol):
    """A way to hold a prefix."""

    name: str

    def hold(self, tokens: Sequence[int]) -> Held:
        """Prefill once, compress once; what was held before is gone."""
        ...

    def close(self) -> None:
        """End its process."""
        ...


def foreign_cache(name: str, folder: Path, *, dtype: str, environment: Path = ENVIRONMENT) -> ForeignCache:
    """Start a cache by name: `hf:dynamic`, `hf:quanto-int4`, or a kvpress method with the share that it keeps.

    Raises:
        TurnKVError: the name is unknown, or the environment lacks what it needs.
    """
    if not _NAMES.fullmatch(name):
        raise TurnKVError(
            f"cache {name!r} is unknown; give hf:dynamic, hf:quanto-int4, or kvpress:METHOD@SHARE, such as "
            "kvpress:snapkv@0.25 (methods: streaming_llm, snapkv, expected_attention, keydiff)"
        )
    python = environment / "bin" / "python"
    if not python.exists():
        raise TurnKVError(f"cache {name}: there is no environment {environment}; call make peers")
    return Worker(name, python, [str(folder), dtype])


class Worker:
    """A cache in its process."""

    def __init__(self, name: str, python: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [python, WORKER, name, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._answer()

    def hold(self, tokens: Sequence[int]) -> "WorkerHeld":
        """Prefill once, compress once; what was held before is gone."""
        return WorkerHeld(self, self.ask(hold=list(tokens))["kv_bytes"])

    def ask(self, **question: Any) -> dict[str, Any]:
        """One question, one answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = [each for each in self._log.read().splitlines() if each.strip()]
            self.close()
            raise TurnKVError(f"cache {self.name} ended: {said[-1] if said else 'it said nothing'}; call make peers")
        answer: dict[str, Any] = json.loads(line)
        return answer


class WorkerHeld:
    """What a worker holds now."""

    def __init__(self, worker: Worker, kv_bytes: int) -> None:
        self._worker = worker
        self.kv_bytes = kv_bytes

    def score(self, tokens: Sequence[int], num_scored: int) -> Tensor:
        """See `Held`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits"
            self._worker.ask(score=list(tokens), num_scored=num_scored, to=str(path))
            return torch.from_numpy(np.fromfile(path, dtype=np.float32)).view(num_scored, -1)
