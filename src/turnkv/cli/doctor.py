"""`turnkv doctor`: what this machine and this installation can do, and where the time to the first token goes."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from turnkv.cli.display import out_console, say
from turnkv.cli.options import EngineOptions
from turnkv.evaluate.machine import cpu_name

PACKAGES = ("turnkv", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_PROMPT = [{"role": "user", "content": "Say hello."}]
_BANDWIDTH_BYTES = 2**29


@dataclass(slots=True)
class _Stopwatch:
    """Seconds of each step from the process's start to the first token."""

    steps: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.steps[name] = time.perf_counter() - started


def run_doctor(options: EngineOptions) -> None:
    """Load the model as any command would, answer one short prompt, and print what was seen."""
    watch = _Stopwatch({"Python and command line": _process_age_s()})
    with watch.step("import torch"):
        import torch  # noqa: PLC0415 (it is what is timed)
    with watch.step("import transformers"):
        import transformers  # noqa: PLC0415, F401 (likewise)
    with watch.step("import turnkv's engine"):
        import turnkv.engine  # noqa: PLC0415, F401 (likewise)
    from turnkv.config import SamplingParams  # noqa: PLC0415 (after torch)
    from turnkv.kernels import cpu, default_body  # noqa: PLC0415 (likewise)
    from turnkv.models.store import cache_folder  # noqa: PLC0415 (likewise)

    with watch.step("load, probe and fuse the model"):
        engine = options.load_engine(say)
    with watch.step("first token of a short prompt"):
        engine.respond(_PROMPT, sampling=SamplingParams(max_new_tokens=1))
    isas = cpu.isas()
    bandwidth = cpu.read_bandwidth(_BANDWIDTH_BYTES)
    _print(
        {
            "versions": ", ".join(_versions()),
            "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "processor": f"{cpu_name()}, {os.cpu_count()} threads, of which {torch.get_num_threads()} compute",
            "memory": _memory(),
            "read bandwidth": f"{bandwidth / 1e9:.1f} GB/s" if bandwidth else "not measured: no C++ kernels",
            "kernels": f"{default_body()}, on {isas[-1]} of {', '.join(isas)}" if isas else "reference: no C++ kernels",
            "model": f"{engine.name}, {options.dtype}, fused: {engine.runner.fusion}",
            "cache folder": _folder(cache_folder()),
        }
    )
    total = sum(watch.steps.values())
    table = Table("start to first token", "s", "share", box=None, pad_edge=False)
    for name, seconds in [*watch.steps.items(), ("all", total)]:
        table.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
    out_console().print()
    out_console().print(table)


def _print(facts: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    out_console().print(table, markup=False)


def _process_age_s() -> float:
    """Seconds since this process began; since its clock began where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} is missing"


def _memory() -> str:
    parts = []
    for name, label in (("MemTotal", "in all"), ("MemAvailable", "available")):
        found = _line_after("/proc/meminfo", name, lambda text: f"{int(text.split()[0]) / 2**20:.1f} GiB")
        if found:
            parts.append(f"{found} {label}")
    return ", ".join(parts) or "unknown"


def _line_after(path: str, name: str, read: Callable[[str], str]) -> str | None:
    """What stands behind `name:` in a file of the system's, if there is one."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((read(line.partition(":")[2].strip()) for line in lines if line.startswith(name)), None)


def _folder(path: Path) -> str:
    if not path.is_dir():
        return f"{path} (not there yet)"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return f"{path}, {size / 1e6:,.0f} MB"
