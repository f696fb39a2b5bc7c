"""One Ray cluster for the session, and workers on it."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before anything imports Ray: this session's cluster is open, and shared with nobody else.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rr-")
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)
os.environ.pop("RAY_ADDRESS", None)

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 90.0


def pytest_configure() -> None:
    # a shell's background jobs ignore Ctrl-C, and so would every process that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of the session's Ray cluster, which this process is connected to."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    address = ray.get_runtime_context().gcs_address
    os.environ["RAY_ADDRESS"] = address
    yield address
    os.environ.pop("RAY_ADDRESS", None)
    ray.shutdown()


@pytest.fixture(scope="module")
def workers(ray_cluster: str) -> Iterator[list[str]]:
    """Two hosted workers; this process is "driver" in their group."""
    import rayrpc as rpc

    names = ["alice", "bob"]
    rpc.start_workers(names)
    yield names
    rpc.shutdown()


@pytest.fixture
def leaves():
    """Two small matrices that require grad."""
    import torch

    torch.manual_seed(1)
    return torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)


class Run:
    """A process under test: its output so far, and its end."""

    def __init__(self, command: list[str], environ: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, text: str, timeout: float = TIMEOUT) -> str:
        """Return the first line with ``text``, as soon as it was printed."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for line in list(self._lines):
                if text in line:
                    return line.strip()
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        pytest.fail(f"{text!r} was not printed; the output is:\n{self.output}")

    def end(self, timeout: float = TIMEOUT) -> int:
        """Return the exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # Python then writes what its threads do
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self._reader.join(5)
            pytest.fail(f"no end after {timeout} s; the output is:\n{self.output}")
        self._reader.join(5)
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start ``python ARGS`` in a folder of the test's own."""
    runs: list[Run] = []

    def start_one(*arguments: str, **environ: str | None) -> Run:
        full = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        full["PYTHONFAULTHANDLER"] = "1"
        for name, value in environ.items():
            full.pop(name, None)
            if value is not None:
                full[name] = value
        runs.append(Run([sys.executable, *arguments], full, tmp_path))
        return runs[-1]

    yield start_one
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            run.process.kill()
        run.process.wait(10)
        if run.process.stdout is not None:
            run._reader.join(5)
            run.process.stdout.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into the test's folder; return its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def eventually(check: Callable[[], bool], timeout: float = 20.0) -> bool:
    """Tell whether ``check`` becomes true in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.05)
    return check()
