"""Peers as processes of their own, each asked by a line of JSON and answering by one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "peers"
ENVIRONMENTS = HERE.parents[1] / ".peers"


class Worker:
    """A peer that has loaded the model and waits."""

    def __init__(self, python: Path, script: str, *arguments: str) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [python, HERE / script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "TURNKV_PEERS_LOG" not in os.environ else None,
            text=True,
        )
        ready = self._answer()
        self.name: str = ready["name"]
        self.version: str = ready["version"]
        self.start_s: float = ready["start_s"]

    def ask(self, **question: Any) -> dict[str, Any]:
        """Run one request: `prompt` (tokens), `new_tokens`, `streams`, `is_warm`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._script} ended; TURNKV_PEERS_LOG=1 shows why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{self._script}: {answer['error']}")
        return answer


def start_peers(model: Path, *, with_llama: bool = True) -> list[Worker]:
    """All peers that `make peers` installed, with a model's folder loaded."""
    gguf = ENVIRONMENTS / f"{model.name}.f16.gguf"
    if not gguf.exists():
        subprocess.run([sys.executable, HERE / "gguf_weights.py", model, gguf], check=True)
    workers = []
    peers = [("vllm", "vllm_cpu.py", model)]
    if with_llama:
        peers.append(("llama-cpp", "llama_cpp.py", gguf))
    packed = [gguf for gguf in ENVIRONMENTS.glob("*.Q4*.gguf") if model.name.startswith(gguf.name.partition(".")[0])]
    peers += [("llama-cpp", "llama_cpp.py", gguf) for gguf in packed if with_llama]
    for name, script, weights in peers:
        python = ENVIRONMENTS / name / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{name} is not installed; call make peers")
        workers.append(Worker(python, script, str(weights)))
    return workers
