"""Find the Ray cluster of this process, or start a local one.

Named by the settings, ``RAY_ADDRESS`` or the hosting actor, a cluster is joined.  Where none is
named, a local one is shared by all processes of this user that need one at the same time, and
ends with the last of them:

    process ──(holds a connection)──> keeper ──(starts, ends)──> Ray

The *keeper* (``ray_local.py``) is a process of its own, so that it does not matter which of the
users' processes came first or ends first, or how it ends: their connections close with them.
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

from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = ["connect", "through_client"]

logger = logging.getLogger(__name__)

START_SECONDS = 60.0

# The connection to the keeper; open as long as this process needs its cluster.
_lease: socket.socket | None = None
_connected_pid: int | None = None


def connect(settings: Settings) -> None:
    """Connect this process to its Ray cluster, unless it is connected.

    Args:
        settings (Settings): ``address`` and what belongs to a local cluster count here.

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
        _use_token()
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
    """Tell whether this process speaks to its cluster by Ray Client, from no node of it."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def _use_token() -> None:
    """Show the user's token, which a local cluster wants; other users' processes have another."""
    os.environ["RAY_AUTH_MODE"] = "token"
    with contextlib.suppress(ImportError):  # a Ray that knows no tokens yet
        from ray._private.authentication import authentication_token_setup

        # the environment was read when Ray was imported, maybe long ago
        authentication_token_setup._enable_token_auth()


def _join_local(settings: Settings) -> str:
    """Return the address of the local cluster, started if need be."""
    global _lease
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"rayrpc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ClusterError(
            f"{folder} belongs to somebody else; set RAY_TMPDIR to a folder of yours"
        )
    # programs of another Python or another Ray need a cluster of their own
    which = hashlib.sha256(f"{sys.prefix} {settings.namespace}".encode()).hexdigest()[:8]
    if settings.address == "local":
        # one for this program: its children inherit the name
        which += "-" + os.environ.setdefault("RAYRPC_INTERNAL_LOCAL", str(os.getpid()))
    path = folder / f"keeper-{which}.sock"
    with _locked(folder / f"keeper-{which}.lock"):
        lease = _knock(path)
        if lease is None:
            path.unlink(missing_ok=True)
            log = folder / f"keeper-{which}.log"
            _start_keeper(path, log, settings)
            lease = _wait_for(lambda: _knock(path), START_SECONDS)
    if lease is None:
        raise ClusterError(f"no local Ray cluster could be started; see {folder}")
    lease.settimeout(START_SECONDS)
    with lease.makefile("r") as lines:
        answer = lines.readline().strip()
    lease.settimeout(None)
    if not answer.startswith("ready "):
        reason = answer or f"see {folder / f'keeper-{which}.log'}"
        raise ClusterError(f"no local Ray cluster could be started: {reason}")
    _lease = lease
    return answer.removeprefix("ready ")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _knock(path: Path) -> socket.socket | None:
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lease.connect(str(path))
    except OSError:
        lease.close()
        return None
    return lease


def _wait_for(attempt: Any, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (result := attempt()) is not None:
            return result
        time.sleep(0.02)
    return None


def _start_keeper(path: Path, log: Path, settings: Settings) -> None:
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
    environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with log.open("w") as output:
        # a session of its own: Ctrl-C in the terminal is not for it
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
