"""Connect this process to its Ray cluster; start a local one if no cluster is named.

A cluster is named by the settings, ``RAY_ADDRESS`` or the hosting actor.  If none is, all
processes of this user share a local cluster, which ends with the last of them:

    process ──(lease)──> local cluster's process ──(starts, ends)──> Ray

A *lease* is a connection to that process (``local_cluster.py``).  The process starts and ends
independently of its clients: a client's lease ends with the client, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.notices import noticed
from rayrpc._transports.encryption import ray_uses_tls
from rayrpc._transports.ray import auth_token, forked_children
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = [
    "connect",
    "control_service_answers",
    "hold_local_cluster",
    "local_file",
    "locked",
    "on_local_cluster",
    "other_local_clusters",
    "own_folder",
    "through_client",
]

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # a busy machine takes many times what a quiet one does
CONNECT_RETRY_SECONDS = 0.02
LOOK_SECONDS = 1.0  # for the answer of a local cluster that runs already
READY = "ready "  # how that begins; the address follows
# What asks Ray's control service would hang for a minute if that has ended.
CONTROL_SECONDS = 5.0
CONTROL_RETRY_SECONDS = 0.2
REACH_SECONDS = 8.0  # for a cluster that may be just starting
EXIT_SECONDS = 0.5  # for its answer when this process ends
# How a client of HTTP/2 begins, and its settings, of which there are none (RFC 9113, section 3.4);
# gRPC's servers send theirs.
HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# Of a local cluster's folder: a socket's path may have 107 bytes, and Ray has some deep below it.
MAX_FOLDER_LENGTH = 107 - len(
    "/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
)

# Kept open for as long as this process needs its local cluster.
_lease: socket.socket | None = None
_held: socket.socket | None = None  # by a worker that outlives its program


def connect(settings: Settings, starts: bool = True) -> None:
    """Connect this process to its Ray cluster, unless it is connected.

    Args:
        settings (Settings): the address and namespace, or the options of a local cluster.
        starts (bool): a local cluster is started if none runs.

    Raises:
        ClusterError: the named cluster cannot be reached, or no local one can be started; or the
            head node of the cluster that this process is connected to has ended.
    """
    logging.getLogger("rayrpc").setLevel(settings.log_level)
    address = settings.address or os.environ.get("RAY_ADDRESS") or None
    forked_children.prepare()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        _register_exit()
        _check_control_service()
        return
    if address in (None, "local"):
        address = _join_local(settings, starts)
        auth_token.enable()
    else:
        _check_reachable(address)
        auth_token.enable_if_needed(address)
    import ray

    _register_exit()
    options: dict[str, Any] = {
        "address": address,
        "namespace": settings.namespace,
        "log_to_driver": False,
        "logging_level": settings.log_level,
        "configure_logging": False,
    }
    if settings.runtime_env:
        options["runtime_env"] = dict(settings.runtime_env)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with noticed(f"the Ray cluster at {address}"):
            ray.init(**options)
        forked_children.set_sigterm(on_sigterm)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as exc:
        raise ClusterError(
            f"cannot connect to the Ray cluster at {address!r}: {exc}. Check --address, "
            "RAY_ADDRESS and the config file; name none to use a local cluster."
        ) from exc


def _check_reachable(address: str) -> None:
    """Raise a ClusterError where Ray would try for minutes; others than ``host:port`` pass."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host and not _has_control_service(address, REACH_SECONDS):
        raise ClusterError(
            f"no Ray cluster answers at {address!r} in {REACH_SECONDS:g} s. Check --address, "
            "RAY_ADDRESS and the config file, and that the head node runs (`ray status` there); "
            "name none to use a local cluster."
        )


@functools.cache
def _register_exit() -> None:
    """Have ``_end_waits`` called before ``ray.shutdown()``, when this process ends; idempotent."""
    import ray  # noqa: F401 - it registers its own first

    atexit.register(_end_waits)


def _end_waits() -> None:
    """End the threads that wait for Ray, if it would not end them itself."""
    import ray

    if ray.is_initialized() and not control_service_answers(EXIT_SECONDS):
        from rayrpc._transports.ray import ray_api

        ray_api.end_waits()


def _check_control_service() -> None:
    if not control_service_answers(CONTROL_SECONDS):
        import ray

        raise ClusterError(
            f"the control service (GCS) of the Ray cluster does not answer at "
            f"{ray.get_runtime_context().gcs_address}: the cluster's head node has ended, or is "
            "cut off. Start the cluster again."
        )


def control_service_answers(seconds: float) -> bool:
    """Tell whether the control service of this process's cluster answers.

    Its port takes connections also while its process is being ended, or is stopped.  Where Ray uses
    TLS, that is taken for an answer.

    Args:
        seconds: how long it may take.
    """
    import ray

    if through_client():
        return True
    return _has_control_service(ray.get_runtime_context().gcs_address, seconds)


def _has_control_service(address: str, seconds: float) -> bool:
    """Tell whether a control service answers at ``host:port``."""
    answers = _accepts if ray_uses_tls(os.environ) else _answers
    host, _, port = address.rpartition(":")
    deadline = Deadline(seconds)
    while not answers((host.strip("[]"), int(port)), deadline.within(seconds)):
        if deadline.expired:
            return False
        time.sleep(deadline.within(CONTROL_RETRY_SECONDS))
    return True


def _accepts(address: tuple[str, int], seconds: float) -> bool:
    """Tell whether a server takes a connection in so many seconds."""
    try:
        socket.create_connection(address, seconds).close()
    except OSError:
        return False
    return True


def _answers(address: tuple[str, int], seconds: float) -> bool:
    """Tell whether a server of gRPC answers in so many seconds."""
    try:
        with socket.create_connection(address, seconds) as connection:
            connection.sendall(HTTP2_BEGIN)
            return bool(connection.recv(1))
    except OSError:
        return False


def through_client() -> bool:
    """Tell whether this process uses Ray Client, from outside of the cluster's nodes."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def _join_local(settings: Settings, starts: bool) -> str:
    """Take a lease of the local cluster, started if there is none; return its address."""
    folder = own_folder()
    if starts and len(os.fsencode(folder)) > MAX_FOLDER_LENGTH:
        raise ClusterError(
            f"no local Ray cluster can be started: the path {folder} is too long for the sockets "
            "below it; set RAY_TMPDIR to a folder with a shorter path"
        )
    auth_token.make_private()
    if starts and settings.dashboard:
        _check_dashboard()
    with noticed("the local Ray cluster to start; `rayrpc up` keeps one that runs"):
        return _take_lease(settings, starts)


def _check_dashboard() -> None:
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as exc:
        raise ClusterError(
            f"the setting `dashboard` needs Ray's dashboard, which is not installed ({exc}): "
            "pip install 'rayrpc[dashboard]', or set it to false"
        ) from None


def _take_lease(settings: Settings, starts: bool) -> str:
    global _lease
    path = local_file(settings, ".sock")
    log = path.with_suffix(".log")
    with locked(path.with_suffix(".lock")):
        lease = _open_lease(path) if starts else _open_any_lease(path)
        if lease is None and starts:
            path.unlink(missing_ok=True)
            _start_local_cluster(path, log, settings)
            lease = _wait_for_lease(path, START_SECONDS)
    if lease is None:
        raise ClusterError(
            f"no local Ray cluster could be started in {START_SECONDS:g} s; see {log}"
            if starts
            else "no Ray cluster that rayrpc has started for this user runs on this host; name one "
            "by --address, RAY_ADDRESS or the config file"
        )
    answer = _answer_of(lease, START_SECONDS)
    if not answer.startswith(READY):
        reason = answer or f"see {log}"
        raise ClusterError(f"no local Ray cluster could be started: {reason}")
    _lease = lease
    return answer.removeprefix(READY)


def local_file(settings: Settings, suffix: str) -> Path:
    """Return a file of the local cluster that the settings mean.

    Args:
        settings (Settings): the address and the namespace.
        suffix (str): what the file's name ends with: ".sock" of the socket.
    """
    # programs of another Python environment, and so another Ray, need a cluster of their own
    identity = hashlib.sha256(f"{sys.prefix} {settings.namespace}".encode()).hexdigest()[:8]
    if settings.address == "local":
        # one for this program and its children, which inherit the environment
        identity += "-" + os.environ.setdefault("RAYRPC_INTERNAL_LOCAL", str(os.getpid()))
    return own_folder() / f"cluster-{identity}{suffix}"


def on_local_cluster() -> bool:
    """Tell whether this process is connected to a local cluster."""
    return _lease is not None


def hold_local_cluster() -> None:
    """Keep the local cluster, if this process runs on one, for as long as this process runs."""
    global _held
    import ray

    address = READY + ray.get_runtime_context().gcs_address
    for path in own_folder().glob("cluster-*.sock"):
        if (lease := _open_lease(path)) is not None:
            with contextlib.suppress(TimeoutError):  # it is just starting: another one
                if _answer_of(lease, LOOK_SECONDS) == address:
                    _held = lease
                    return
            lease.close()


def other_local_clusters() -> list[str]:
    """Return the addresses of this user's local clusters on this host, but for this process's."""
    import ray

    answers = []
    for path in sorted(own_folder().glob("cluster-*.sock")):
        if (lease := _open_lease(path)) is not None:
            with lease, contextlib.suppress(TimeoutError):  # it is just starting
                answers.append(_answer_of(lease, LOOK_SECONDS))
    found = [each.removeprefix(READY) for each in answers if each.startswith(READY)]
    mine = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    return [each for each in found if each != mine]


def own_folder() -> Path:
    """Return this user's folder on this node, which nobody else can enter.

    Raises:
        ClusterError: there is something else in its place.
    """
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"rayrpc-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not of what a link of another user points to
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise ClusterError(
            f"{folder} is no folder of user {os.getuid()}; remove it, or set RAY_TMPDIR to a "
            "folder of your own"
        )
    if stat.S_IMODE(found.st_mode) != 0o700:  # by the umask, or an earlier version
        folder.chmod(0o700)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which ends with this process at the latest."""
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


def _answer_of(lease: socket.socket, seconds: float) -> str:
    """Return how the start of a local cluster ended; empty if its process has."""
    lease.settimeout(seconds)
    with lease.makefile("r") as lines:
        answer = lines.readline().strip()
    lease.settimeout(None)
    return answer


def _open_any_lease(path: Path) -> socket.socket | None:
    """Connect to a local cluster, or to another one of this user if it does not run."""
    others = sorted(path.parent.glob("cluster-*.sock"), key=lambda each: -each.stat().st_mtime)
    leases = (_open_lease(each) for each in dict.fromkeys([path, *others]))
    return next((lease for lease in leases if lease is not None), None)


def _wait_for_lease(path: Path, seconds: float) -> socket.socket | None:
    deadline = Deadline(seconds)
    while not deadline.expired:
        if (lease := _open_lease(path)) is not None:
            return lease
        time.sleep(CONNECT_RETRY_SECONDS)
    return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
    not_sent = ("RAY_ADDRESS", "RAYRPC_INTERNAL_SHIM")  # it outlives this program
    environ = {k: v for k, v in os.environ.items() if k not in not_sent}
    environ["RAY_AUTH_MODE"] = "token"
    # at Ray's own 15, workers of a program starve beside whatever else its user runs
    environ.setdefault("RAY_worker_niceness", "0")
    environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with open(log, "w", opener=_open_private) as output:
        # a session of its own, so that Ctrl-C in the terminal does not end it
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
