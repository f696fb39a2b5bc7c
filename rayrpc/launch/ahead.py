"""Start what workers will need while something else goes on: a script's imports, Ray's start."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from rayrpc._concurrency.threads import start_thread
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.local_lease import start_ahead
from rayrpc.config import Settings
from rayrpc.errors import RpcError
from rayrpc.launch.preloading import load_torch

__all__ = ["connect_for_workers", "start_for_script"]

_USES_RPC = b"rpc"
_STARTS_WORKERS = (b"spawn", b"start_processes", b"start_workers")


def start_for_script(path: str, settings: Settings) -> None:
    """Start the local cluster, and load torch for its workers, in another thread.

    Args:
        path (str): of the script; its text tells what it uses.
        settings (Settings): of the run.
    """
    with contextlib.suppress(OSError):
        text = Path(path).read_bytes()
        if _USES_RPC in text:
            hosts = any(word in text for word in _STARTS_WORKERS)
            environ = dict(os.environ)
            start_thread(lambda: _start(settings, environ, hosts), "rayrpc-ahead", None)


def connect_for_workers(settings: Settings) -> None:
    """Connect this process to its cluster; a local one loads torch for workers while Ray starts.

    Args:
        settings (Settings): see ``connect``.

    Raises:
        ClusterError: see ``connect``.
    """
    if not ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        _start(settings, dict(os.environ), hosts=True)
    connect(settings)


def _start(settings: Settings, environ: dict[str, str], hosts: bool) -> None:
    with contextlib.suppress(RpcError, OSError):  # connect raises it, too
        socket = start_ahead(settings)
        if socket is not None and hosts:
            load_torch(socket, environ)
