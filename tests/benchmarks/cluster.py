"""The Ray cluster of a benchmark, and the wait until it is quiet."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

__all__ = ["ROOT", "about_text", "clean_up_on_sigterm", "cluster", "settle"]

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CLUSTER_CPUS = 4

QUIET_CORES = 0.25  # Ray's own processes take about 0.1 when nothing is asked of them
QUIET_SECONDS = 2.0
PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.5


def clean_up_on_sigterm() -> None:
    """Let SIGTERM end the program by way of its ``finally`` clauses."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Run a Ray cluster that children join; gives what there is to know about the run."""
    folder = tempfile.mkdtemp(prefix="rb-")
    paths = [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling); peers run at 0, too
    os.environ["RAY_TMPDIR"] = folder
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    try:
        ray.init(
            num_cpus=CLUSTER_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        clean_up_on_sigterm()  # Ray's own handler aborts
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        yield _about()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _about() -> dict[str, str]:
    sys.path.insert(0, str(ROOT))
    import rayrpc

    return {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ray": metadata.version("ray"),
        "rayrpc": rayrpc.__version__,
    }


def about_text(about: dict[str, str]) -> str:
    """Return what ``cluster`` gave as one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# -- quiet --------------------------------------------------------------------------------------


def settle() -> None:
    """Wait until this benchmark's processes are idle.

    Ray starts its idle workers ahead of need, and each imports for seconds.  What others do on
    the machine is not waited for.
    """
    patience_ends = time.monotonic() + PATIENCE_SECONDS
    quiet_since = start = time.monotonic()
    before = _cpu_seconds()
    while start - quiet_since < QUIET_SECONDS and start < patience_ends:
        time.sleep(POLL_SECONDS)
        now, end = _cpu_seconds(), time.monotonic()
        used = sum(seconds - before.get(pid, 0.0) for pid, seconds in now.items())
        if used / (end - start) > QUIET_CORES:
            quiet_since = end
        before, start = now, end
    if start - quiet_since < QUIET_SECONDS:
        print(f"not quiet after {PATIENCE_SECONDS:g} s", file=sys.stderr)


def _cpu_seconds() -> dict[int, float]:
    """Return the CPU time of every process below this one, by id; empty without /proc."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()  # from the third on: proc(5)
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    per_second = os.sysconf("SC_CLK_TCK")
    return {pid: ticks[pid] / per_second for pid in ticks if _is_below(os.getpid(), pid, parents)}


def _is_below(ancestor: int, pid: int, parents: dict[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == ancestor:
            return True
    return False
