"""What a failed test leaves to be looked at: the state of the machine, stacks, Ray's logs.

The processes of one run of the tests have ``TESTS_FOLDER`` in their environment: the folder
in which all that the run writes lies, Ray's files among it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["FOLDER", "describe", "end_processes", "machine_state", "processes_of"]

FOLDER = "TESTS_FOLDER"

SAMPLE_SECONDS = 0.3
BUSY_CORES = 0.1
STACKS_SECONDS = 3.0  # for all processes to write their stacks
END_SECONDS = 10.0
STACK_CHARACTERS = 20_000  # of one process
LOG_LINES = 15  # of one log
LOG_CHARACTERS = 2_500
LOGS = 10
# Prestarted by Ray, and not given any work.
IDLE = "ray::IDLE"


def machine_state() -> str:
    """Return load, cores, memory, and what uses the processor, in a few lines."""
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    lines = [
        f"load {load} on {len(os.sched_getaffinity(0))} cores; "
        f"{memory.available >> 20} of {memory.total >> 20} MB of memory are free, "
        f"{shared.free >> 20} of {shared.total >> 20} MB of /dev/shm"
    ]
    before = _processor_seconds()
    start = time.monotonic()
    time.sleep(SAMPLE_SECONDS)
    after = _processor_seconds()
    passed = time.monotonic() - start
    used = {pid: (seconds - before.get(pid, 0.0)) / passed for pid, seconds in after.items()}
    for pid in sorted(used, key=used.__getitem__, reverse=True)[:8]:
        if used[pid] >= BUSY_CORES and pid != os.getpid():
            lines.append(f"  {used[pid]:.1f} of a core: {pid} {_command(pid)[:120]}")
    return "\n".join(lines)


def _processor_seconds() -> dict[int, float]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return "(it has ended)"


def processes_of(folder: Path) -> list[int]:
    """Return the processes of the run of the tests whose folder this is, without this process."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return sorted(set(found) - {os.getpid()})


def describe(folder: Path, since: float) -> str:
    """Return what the processes of a run do now, and what Ray has logged.

    Args:
        folder: of the run.
        since: only logs written after this time, in seconds since the epoch.
    """
    parts = [f"-- machine: {machine_state()}"]
    parts += [f"-- stacks of {who}:\n{text}" for who, text in _stacks(folder)]
    parts += [f"-- {path.name}:\n{text}" for path, text in _log_tails(folder, since)]
    return "\n".join(parts)


def _stacks(folder: Path) -> Iterator[tuple[str, str]]:
    """Have all Python processes of a run write the stacks of their threads."""
    written = folder / "stacks"
    if not written.is_dir():
        return
    before = {path: path.stat().st_size for path in written.iterdir()}
    asked = []
    for pid in processes_of(folder):
        if _command(pid).startswith(IDLE) or not _writes_stacks(pid):
            continue
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
            asked.append(pid)
    size = -1
    end = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < end:
        time.sleep(0.2)
        now = sum(path.stat().st_size for path in written.iterdir())
        if now == size:
            break
        size = now
    for path in sorted(written.iterdir(), key=lambda path: int(path.name)):
        with path.open(errors="replace") as file:
            file.seek(before.get(path, 0))
            if text := file.read().strip():
                forked = "" if int(path.name) in asked else " (or its forked children)"
                yield f"{path.name} {_command(int(path.name))[:120]}{forked}", _shortened(text)


def _writes_stacks(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which ends others."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def _shortened(stacks: str, characters: int = STACK_CHARACTERS) -> str:
    """Leave out the threads that run no Python, of which Ray has dozens, and then the middle."""
    threads = [each for each in stacks.split("\n\n") if "<no Python frame>" not in each]
    text = "\n\n".join(threads)
    if len(text) <= characters:
        return text
    return f"{text[: characters // 2]}\n[...]\n{text[-characters // 2 :]}"


def _log_tails(folder: Path, since: float) -> Iterator[tuple[Path, str]]:
    logs = []
    for path in folder.glob("**/logs/*"):
        with contextlib.suppress(OSError):
            about = path.stat()
            if path.is_file() and about.st_size and about.st_mtime >= since:
                logs.append((about.st_mtime, path))
    for _, path in sorted(logs, reverse=True)[:LOGS]:
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            yield path, "\n".join(lines)[-LOG_CHARACTERS:]


def end_processes(folder: Path) -> list[str]:
    """Kill the processes of a run; return their command lines."""
    ended = []
    end = time.monotonic() + END_SECONDS
    while (left := processes_of(folder)) and time.monotonic() < end:
        for pid in left:
            command = _command(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(command)
        time.sleep(0.1)
    return list(dict.fromkeys(ended))
