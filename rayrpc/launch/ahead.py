"""Start what ``rayrpc run`` will need while the script still loads its modules."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rayrpc._concurrency.threads import start_thread
from rayrpc._transports.ray.local_lease import start_ahead
from rayrpc.config import Settings
from rayrpc.errors import RpcError
from rayrpc.launch.preloading import load_torch

__all__ = ["start_for_script"]

_USES_RPC = b"rpc"
_STARTS_WORKERS = (b"spawn", b"start_processes", b"start_workers")


def start_for_script(path: str, settings: Settings) -> None:
    """Start the local cluster, and load torch for its workers, in another thread.

    Errors are left to ``connect``.

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


def _start(settings: Settings, environ: dict[str, str], hosts: bool) -> None:
    with contextlib.suppress(RpcError, OSError):
        socket = start_ahead(settings)
        if socket is not None and hosts:
            load_torch(socket, environ)
