"""Some probes of the differential suite; `make compliance` runs all of them."""

from pathlib import Path

import pytest
from suites import run_suite


@pytest.mark.process
@pytest.mark.compliance
@pytest.mark.slow
def test_errors_are_as_torchs():
    output = run_suite(Path(__file__).with_name("compare.py"), "-k", "errors.", timeout=240)
    assert ", 0 bad" in output
