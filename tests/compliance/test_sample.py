"""The sample of PyTorch's own RPC suites; `make compliance` runs the core of them."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.compliance
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sample_of_torchs_own_suites_passes():
    # a process of its own: the ranks are forked, and pytest's may have threads
    command = [sys.executable, str(HERE / "run.py"), "--tests", str(HERE / "sample.txt")]
    command += ["--jobs", "2"]
    # without coverage, which forks slowly: these are torch's tests, with torch's time limits
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1750,
    )
    assert done.returncode == 0, f"the end of what it printed:\n{done.stdout[-6000:]}"
