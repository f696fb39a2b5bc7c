"""The sample of PyTorch's own RPC suites; `make compliance` runs the core of them."""

from pathlib import Path

import pytest
from suites import run_suite

HERE = Path(__file__).parent


@pytest.mark.process
@pytest.mark.compliance
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sample_of_torchs_own_suites_passes():
    run_suite(HERE / "run.py", "--tests", str(HERE / "sample.txt"), "--jobs", "2", timeout=1700)
