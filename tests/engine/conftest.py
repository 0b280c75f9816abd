import pytest
import torch
from tests.families import NEAR_TIES

# Tiny models: a second thread costs more than it brings.
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NEAR_TIES:
        found = ", ".join(f"{family} {ties} of {tokens}" for family, (ties, tokens) in sorted(NEAR_TIES.items()))
        terminalreporter.write_line(f"greedy near-ties: {found}")
