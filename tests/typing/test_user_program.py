"""Public functions have the types that a typed program expects; mypy checks it too."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")


@pytest.mark.process
@pytest.mark.slow
def test_pyright_agrees_with_the_typed_program():
    if shutil.which("node") is None:
        pytest.skip("pyright runs in node, which is not installed")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(PROGRAM)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
