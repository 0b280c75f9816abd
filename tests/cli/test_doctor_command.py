"""`turnkv doctor`."""

import re

import pytest
from tests.cli.conftest import Turnkv

from turnkv.kernels import cpu


def test_the_doctor_names_what_runs_and_splits_the_time_to_the_first_token(turnkv: Turnkv) -> None:
    done = turnkv("doctor")
    assert done.exit_code == 0
    for name in ("versions", "processor", "memory", "read bandwidth", "kernels", "model", "cache folder"):
        assert re.search(rf"^{name} +\S", done.stdout, re.MULTILINE), name
    steps = re.findall(r"^(.+?) +([\d.]+) +(\d+)%", done.stdout, re.MULTILINE)
    assert [name for name, *_ in steps][-1] == "all"
    *parts, whole = (float(seconds) for _, seconds, _ in steps)
    assert sum(parts) == pytest.approx(whole, abs=0.05)
    assert sum(int(share) for *_, share in steps[:-1]) == pytest.approx(100, abs=4)


@pytest.mark.skipif(not cpu.isas(), reason="the C++ kernels were not built")
def test_the_doctor_names_the_kernels_in_use(turnkv: Turnkv) -> None:
    stdout = turnkv("doctor", "--weights", "int8").stdout
    assert f"cpu, on {cpu.isas()[-1]} of " in stdout
    assert re.search(r"fused: (\d+) of \1 layers, output head", stdout)
    assert re.search(r"read bandwidth +[\d.]+ GB/s", stdout)
