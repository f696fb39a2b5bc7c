"""``rayrpc up`` and ``rayrpc down``: a local cluster that is there before the programs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._transports.ray.cluster import local_file
from rayrpc.config import Settings
from rayrpc.errors import ClusterError, ConfigError
from rayrpc.launch.standby_pool import FAILED, READY, lock_file, process_of

__all__ = ["down", "up"]

UP_SECONDS = 180.0  # a busy machine takes many times what a quiet one does
DOWN_SECONDS = 10.0
POLL_SECONDS = 0.1


def up(settings: Settings) -> str:
    """Keep a local cluster, and processes that have loaded torch.

    Args:
        settings (Settings): ``standby_workers``, ``idle_timeout``, and those of local clusters.

    Returns:
        What has been done, for a terminal.

    Raises:
        ConfigError: another cluster is named.
        ClusterError: it could not be started.
    """
    _check(settings)
    path = lock_file(settings)
    if pid := process_of(path):
        return f"the local cluster is up already (pid {pid})"
    log = path.with_suffix(".up.log")
    deadline = Deadline(UP_SECONDS)
    for line in _started(settings, str(log), deadline):
        if line == READY:
            if sys.stderr.isatty():
                print(file=sys.stderr)
            return (
                f"the local cluster is up, with {settings.standby_workers} processes for workers; "
                "`rayrpc down` ends it"
            )
        if sys.stderr.isatty() and line.isdigit():
            text = f"\r{line} of {settings.standby_workers} processes have loaded torch "
            print(text, end="", file=sys.stderr, flush=True)
        if line.startswith(FAILED):
            raise ClusterError(f"`rayrpc up` failed: {line.removeprefix(FAILED)}; see {log}")
    if deadline.expired:
        raise ClusterError(f"`rayrpc up` is not through after {UP_SECONDS:g} s; see {log}")
    raise ClusterError(f"`rayrpc up` failed; see {log}")


def down(settings: Settings) -> str:
    """End what ``up`` keeps, once no program uses it.

    Args:
        settings (Settings): as for ``up``.

    Returns:
        What has been done, for a terminal.

    Raises:
        ConfigError: another cluster is named.
    """
    _check(settings)
    path = lock_file(settings)
    pid = process_of(path)
    if pid is None:
        return "no local cluster is up"
    os.kill(pid, signal.SIGTERM)
    deadline = Deadline(DOWN_SECONDS)
    while process_of(path) == pid or local_file(settings, ".sock").exists():
        if deadline.expired:
            return "programs use the local cluster; it ends with the last of them"
        time.sleep(POLL_SECONDS)
    return "the local cluster is down"


def _check(settings: Settings) -> None:
    named = settings.address or os.environ.get("RAY_ADDRESS")
    if named:
        raise ConfigError(
            f"`rayrpc up` keeps a local cluster, but {named!r} is named by --address, the settings "
            "or RAY_ADDRESS"
        )


def _started(settings: Settings, log: str, deadline: Deadline) -> Iterator[str]:
    """Start the process that keeps it; yield the lines that it writes, until it is up."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "rayrpc.launch.standby_pool", str(write_end)]
    private = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with (
        open(read_end, "rb", buffering=0) as lines,
        os.fdopen(os.open(log, private, 0o600), "w") as output,
    ):
        try:
            # a session of its own, so that Ctrl-C in the terminal does not end it
            process = subprocess.Popen(
                command,
                pass_fds=[write_end],
                cwd=os.path.dirname(log),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have failed
            pipe.write(json.dumps(settings.to_dict()).encode())
        while select.select([lines], [], [], deadline.remaining())[0]:
            if not (line := lines.readline()):
                return
            yield line.decode().strip()
