"""What tests of launching share."""

import contextlib
from pathlib import Path

from conftest import eventually

import rayrpc as rpc
from rayrpc import errors


def runner(start, script):
    """Return a function that starts ``rayrpc run SCRIPT ARGS`` with the script's text."""

    def run_one(text, *arguments, options=(), **environ):
        return start("-m", "rayrpc", "run", *options, script(text), *arguments, **environ)

    return run_one


def connected(group: str) -> rpc.Group:
    """Connect to a group once its workers are there."""
    made: list[rpc.Group] = []

    def is_there() -> bool:
        try:
            made.append(rpc.connect(group))
        except errors.GroupError as exc:
            assert "with workers" in str(exc)
        return bool(made)

    assert eventually(is_there, 100)
    return made[0]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended, but was not reaped, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads; ``{"T"}``: all are stopped."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def processes_of(folder: str) -> list[str]:
    """Return the command lines of processes that belong to a local cluster kept in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = (path / "environ").read_bytes().decode(errors="replace")
            ours = ("raylet", "gcs_server", "ray_local", "ray::", "ray/", "log_monitor")
            if any(name in command for name in ours) and folder in command + environ:
                found.append(command)
    return found
