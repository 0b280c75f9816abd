"""What a figure was measured on."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor as its maker names it; its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
