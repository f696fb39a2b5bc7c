"""Have Ray fork the workers of a cluster that this process starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayrpc._transports.ray import fork_server, start_worker

__all__ = ["FORKS", "Load", "forked_workers", "load", "loaded"]

#: ends the name of the socket of a local cluster's fork server
FORKS = ".forks"

END_SECONDS = 10.0
REQUEST_SECONDS = 5.0
BACKLOG = 128
# What each worker loads, beside Ray: modules of others that Ray loads, and large ones of Python's.
LIGHT = (
    "asyncio",
    "concurrent.futures",
    "google.protobuf",
    "jsonschema",
    "multiprocessing",
    "psutil",
    "requests",
    "yaml",
)


@contextlib.contextmanager
def forked_workers(path: Path) -> Iterator[int]:
    """Have the nodes of Ray that this process starts from now on fork their workers.

    Args:
        path (Path): of the fork server's UNIX socket, which the caller removes.  The fork server
            ends with the block, when the nodes have to have ended.

    Yields:
        The process id of the fork server.
    """
    with _serve(path) as server:
        os.environ[start_worker.SERVER] = str(path)
        try:
            yield server.pid
        finally:
            os.environ.pop(start_worker.SERVER, None)


@contextlib.contextmanager
def _serve(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a fork server within the block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        server = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(listener.fileno()), *LIGHT],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    try:
        yield server
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


class Load(NamedTuple):
    """What the workers of a program need loaded.

    Args:
        modules (Sequence[str]): what they have loaded.
        later (Sequence[str]): what they have loaded unless they start at once, and if it can be.
        files (Mapping[str, str]): the files that some of these must be.
        version (str): of the files; processes that have loaded another one are not used.
        environ (Mapping[str, str]): what these modules read when they are loaded.
        read (Sequence[str]): how the names of such variables begin.
    """

    modules: Sequence[str]
    later: Sequence[str]
    files: Mapping[str, str]
    version: str
    environ: Mapping[str, str]
    read: Sequence[str]


def load(path: Path, what: Load, seconds: float = 0.0) -> bool:
    """Have a fork server load something before there are workers that need it.

    Args:
        path (Path): of its socket.
        what (Load): to be loaded.
        seconds (float): how long to wait until it is loaded.

    Returns:
        Whether it is.
    """
    connection, is_loaded = _ask(path, {"load": what._asdict()}, seconds)
    connection.close()
    return is_loaded


@contextlib.contextmanager
def loaded(path: Path, what: Load, cluster: str, job: str) -> Iterator[None]:
    """Have the workers of a job that start within the block find something loaded.

    Args:
        path (Path): of the socket of the cluster's fork server.
        what (Load): to be loaded.
        cluster (str): address of its control service.
        job (str): id of the job.
    """
    wanted = {"cluster": cluster, "job": job, "load": what._asdict()}
    with _ask(path, wanted, REQUEST_SECONDS)[0]:
        yield


def _ask(path: Path, wanted: dict[str, Any], seconds: float) -> tuple[socket.socket, bool]:
    """Send a request; return its connection, and whether it was confirmed in that time."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    text = json.dumps(wanted).encode()
    with contextlib.suppress(OSError):
        connection.connect(str(path))
        connection.sendall(start_worker.HEADER.pack(len(text), 0) + text)
        if seconds:
            connection.settimeout(seconds)
            return connection, bool(connection.recv(1))
    return connection, False
