"""Suites that run apart from pytest, which has threads: they fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_suite"]

END_SECONDS = 30.0


def run_suite(program: Path, *arguments: str, timeout: float) -> str:
    """Run a suite on a cluster of its own, and return its output; the test fails if the suite does.

    Coverage is left out: it makes forks slow, and the suites have time limits.

    Args:
        program: the suite's file; SIGTERM ends it and what it started.
        arguments: of its command line.
        timeout: in seconds.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "RAY_ADDRESS" and not name.startswith("COVERAGE")
    }
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    why = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        why = f"it ran for {timeout:g} s; "
        process.terminate()
        try:
            output, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output = "(it did not end by SIGTERM)"
    if why or process.returncode != 0:
        end = output[-60_000:]
        pytest.fail(f"{program.name}: {why}the end of its output:\n{end}", pytrace=False)
    return output
