"""A lease of the local cluster: the connection of a process that needs it to its process.

A lease is a connection to the process of ``local_cluster.py``, which ends when the last one is
closed.  It starts and ends independently of its clients: a client's lease ends with the client,
however that ends.  A client may ask it to stay without leases, for ``rayrpc up``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.notices import noticed
from rayrpc._transports.ray import auth_token
from rayrpc._transports.ray.local_cluster import CHANGED, KEEP, READY, RELEASE
from rayrpc._transports.ray.start_worker import SERVER
from rayrpc._transports.ray.worker_forks import FORKS
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = [
    "fork_server",
    "hold_local_cluster",
    "join_local",
    "keep",
    "local_file",
    "locked",
    "other_local_clusters",
    "own_folder",
    "release",
    "start_ahead",
]

START_SECONDS = 120.0  # a busy machine takes many times what a quiet one does
CONNECT_RETRY_SECONDS = 0.02
LOOK_SECONDS = 1.0  # for the answer of a local cluster that runs already

# Of a local cluster's folder: a socket's path may have 107 bytes, and Ray has some deep below it.
MAX_FOLDER_LENGTH = 107 - len(
    "/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
)

# Kept open for as long as this process needs its local cluster.
_lease: socket.socket | None = None
_held: socket.socket | None = None  # by a worker that outlives its program
_ahead: dict[Path, socket.socket] = {}  # of clusters that were started ahead, by their sockets


def join_local(settings: Settings, starts: bool) -> str:
    """Take a lease of the local cluster, started if there is none; return its address."""
    global _lease
    with noticed("the local Ray cluster to start; `rayrpc up` keeps one that runs"):
        _lease, address = _take(settings, starts)
    return address


def _check_local(settings: Settings) -> None:
    """Raise a ClusterError if no local cluster can be started."""
    folder = own_folder()
    if len(os.fsencode(folder)) > MAX_FOLDER_LENGTH:
        raise ClusterError(
            f"no local Ray cluster can be started: the path {folder} is too long for the sockets "
            "below it; set RAY_TMPDIR to a folder with a shorter path"
        )
    if not settings.dashboard:
        return
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as exc:
        raise ClusterError(
            f"the setting `dashboard` needs Ray's dashboard, which is not installed ({exc}): "
            "pip install 'rayrpc[dashboard]', or set it to false"
        ) from None


def _take(settings: Settings, starts: bool) -> tuple[socket.socket, str]:
    """Return a lease, and the address of its cluster."""
    if starts:
        _check_local(settings)
    auth_token.make_private()
    path = local_file(settings, ".sock")
    log = path.with_suffix(".log")
    with locked(path.with_suffix(".lock")):
        lease = _ahead.pop(path, None)
        if lease is None:
            lease = _open_or_start(path, settings) if starts else _open_any_lease(path)
    if lease is None:
        raise ClusterError(
            f"no local Ray cluster could be started in {START_SECONDS:g} s; see {log}"
            if starts
            else "no Ray cluster that rayrpc has started for this user runs on this host; name one "
            "by --address, RAY_ADDRESS or the config file"
        )
    answer = ""
    try:
        with contextlib.suppress(TimeoutError):
            answer = _answer_of(lease, START_SECONDS)
        if not answer.startswith(READY):
            reason = answer or f"see {log}"
            raise ClusterError(f"no local Ray cluster could be started: {reason}")
    except BaseException:
        lease.close()  # else the error, which refers to this frame, would keep it
        raise
    return lease, answer.removeprefix(READY)


def start_ahead(settings: Settings) -> Path | None:
    """Start the local cluster that ``connect`` will use, if none runs; do not wait for Ray.

    Args:
        settings (Settings): as for ``connect``.

    Returns:
        The socket of its fork server; None: a cluster is named, or none could be started.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS") or None
    if address not in (None, "local"):
        return None
    _check_local(settings)
    auth_token.make_private()
    path = local_file(settings, ".sock")
    with locked(path.with_suffix(".lock")):
        if path not in _ahead:
            lease = _open_or_start(path, settings)
            if lease is None:
                return None
            _ahead[path] = lease
    return path.with_suffix(FORKS)


def keep(settings: Settings, seconds: float) -> tuple[bool, Path]:
    """Have the local cluster stay without leases; start it if it does not run.

    Args:
        settings (Settings): which cluster; its options if it is started.
        seconds (float): how long it stays without leases; 0: for ever.

    Returns:
        Whether it is kept only now, and the socket of its fork server.

    Raises:
        ClusterError: it could not be started, does not answer, or has ended meanwhile.
    """
    with noticed("the local Ray cluster to start"):
        lease, _ = _take(settings, starts=True)
    with lease:
        path = Path(lease.getpeername())
        answer = _ask(lease, f"{KEEP} {seconds:g}\n")
        if not answer:
            raise ClusterError(
                "the local Ray cluster ended while it was told to stay; try again, or see "
                f"{path.with_suffix('.log')}"
            )
        return answer == CHANGED, path.with_suffix(FORKS)


def release(settings: Settings) -> bool:
    """Have the local cluster end with its leases again.

    Args:
        settings (Settings): which cluster.

    Returns:
        Whether it was kept.

    Raises:
        ClusterError: it does not answer.
    """
    lease = _open_lease(local_file(settings, ".sock"))
    if lease is None:
        return False
    with lease:
        return _ask(lease).startswith(READY) and _ask(lease, f"{RELEASE}\n") == CHANGED


def _ask(lease: socket.socket, text: str = "") -> str:
    """Tell the local cluster something; return its answer, which is empty if it has ended.

    Args:
        lease: of the cluster.
        text: a line; empty: the cluster says by itself how its start ended.

    Raises:
        ClusterError: it does not answer.
    """
    path = Path(lease.getpeername())
    try:
        lease.sendall(text.encode())
        return _answer_of(lease, START_SECONDS)
    except ConnectionError:
        return ""
    except TimeoutError:
        raise ClusterError(
            f"the local Ray cluster has not answered for {START_SECONDS:g} s; see "
            f"{path.with_suffix('.log')}, and end the process that has {path} open"
        ) from None


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


def fork_server() -> Path | None:
    """Return the socket of the fork server of this process's cluster; None: it has none."""
    if _lease is not None:
        return Path(_lease.getpeername()).with_suffix(FORKS)
    path = os.environ.get(SERVER)  # of a worker, and of what it starts
    return Path(path) if path else None


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


def _open_or_start(path: Path, settings: Settings) -> socket.socket | None:
    """Connect to the local cluster, started if it does not run; None: it does not start."""
    lease = _open_lease(path)
    if lease is None:
        path.unlink(missing_ok=True)
        _start_local_cluster(path, path.with_suffix(".log"), settings)
        lease = _wait_for_lease(path, START_SECONDS)
    return lease


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
    # workers that start before their program do not have loaded what it needs
    environ.setdefault("RAY_prestart_worker_first_driver", "0")
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
