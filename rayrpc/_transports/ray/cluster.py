"""Connect this process to its Ray cluster; start a local one if no cluster is named.

A cluster is named by the settings, ``RAY_ADDRESS`` or the hosting actor.  If none is, all
processes of this user share a local cluster, which ends with the last of them:

    process ──(lease)──> local cluster's process ──(starts, ends)──> Ray

A *lease* is a connection to that process (``local_cluster.py``).  The process starts and ends
independently of its clients: a client's lease ends with the client, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayrpc._concurrency.deadlines import Deadline
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = ["connect", "through_client"]

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
CONNECT_RETRY_SECONDS = 0.02

# Kept open for as long as this process needs its local cluster.
_lease: socket.socket | None = None
_connected_pid: int | None = None


def connect(settings: Settings) -> None:
    """Connect this process to its Ray cluster, unless it is connected.

    Args:
        settings (Settings): the address and namespace, or the options of a local cluster.

    Raises:
        ClusterError: the named cluster cannot be reached, or no local one can be started.
    """
    global _connected_pid
    logging.getLogger("rayrpc").setLevel(settings.log_level)
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        if _connected_pid not in (None, os.getpid()):
            raise ClusterError(
                "this process was forked from one that is connected to Ray, and cannot use that "
                "connection. Start it with multiprocessing.get_context('spawn'), or before the "
                "first use of rayrpc."
            )
        return
    if address in (None, "local"):
        address = _join_local(settings)
        _use_auth_token()
    import ray

    options: dict[str, Any] = {
        "address": address,
        "namespace": settings.namespace,
        "log_to_driver": False,
        "logging_level": settings.log_level,
        "configure_logging": False,
    }
    if settings.runtime_env:
        options["runtime_env"] = dict(settings.runtime_env)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as exc:
        raise ClusterError(
            f"cannot connect to the Ray cluster at {address!r}: {exc}. Check --address, "
            "RAY_ADDRESS and the config file; name none to use a local cluster."
        ) from exc
    _connected_pid = os.getpid()


def through_client() -> bool:
    """Tell whether this process uses Ray Client, from outside of the cluster's nodes."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def _use_auth_token() -> None:
    """Authenticate by the user's token; a local cluster refuses other users' processes."""
    os.environ["RAY_AUTH_MODE"] = "token"
    with contextlib.suppress(ImportError):  # a version of Ray without tokens
        from ray._private.authentication import authentication_token_setup

        # Ray reads the environment when it is imported, which may have been before
        authentication_token_setup._enable_token_auth()


def _join_local(settings: Settings) -> str:
    """Take a lease of the local cluster, started if there is none; return its address."""
    global _lease
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"rayrpc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ClusterError(
            f"{folder} belongs to another user; set RAY_TMPDIR to a folder of your own"
        )
    # programs of another Python environment, and so another Ray, need a cluster of their own
    identity = hashlib.sha256(f"{sys.prefix} {settings.namespace}".encode()).hexdigest()[:8]
    if settings.address == "local":
        # one for this program and its children, which inherit the environment
        identity += "-" + os.environ.setdefault("RAYRPC_INTERNAL_LOCAL", str(os.getpid()))
    path = folder / f"cluster-{identity}.sock"
    log = path.with_suffix(".log")
    with _locked(path.with_suffix(".lock")):
        lease = _open_lease(path)
        if lease is None:
            path.unlink(missing_ok=True)
            _start_local_cluster(path, log, settings)
            lease = _wait_for_lease(path, START_SECONDS)
    if lease is None:
        raise ClusterError(
            f"no local Ray cluster could be started in {START_SECONDS:g} s; see {log}"
        )
    lease.settimeout(START_SECONDS)
    with lease.makefile("r") as lines:
        answer = lines.readline().strip()
    lease.settimeout(None)
    if not answer.startswith("ready "):
        reason = answer or f"see {log}"
        raise ClusterError(f"no local Ray cluster could be started: {reason}")
    _lease = lease
    return answer.removeprefix("ready ")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_lease(path: Path) -> socket.socket | None:
    """Connect to the local cluster; return None if it does not run."""
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lease.connect(str(path))
    except OSError:
        lease.close()
        return None
    return lease


def _wait_for_lease(path: Path, seconds: float) -> socket.socket | None:
    deadline = Deadline(seconds)
    while not deadline.expired:
        if (lease := _open_lease(path)) is not None:
            return lease
        time.sleep(CONNECT_RETRY_SECONDS)
    return None


def _start_local_cluster(path: Path, log: Path, settings: Settings) -> None:
    command = [
        sys.executable,
        "-m",
        "rayrpc._transports.ray.local_cluster",
        str(path),
        settings.namespace,
        str(settings.local_num_cpus or 0),
        str(int(settings.dashboard)),
    ]
    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environ["RAY_AUTH_MODE"] = "token"
    # at Ray's own 15, workers of a program starve beside whatever else its user runs
    environ.setdefault("RAY_worker_niceness", "0")
    environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with log.open("w") as output:
        # a session of its own, so that Ctrl-C in the terminal does not end it
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
