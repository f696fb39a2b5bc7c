"""The process of a local Ray cluster.

Run as ``python -m rayrpc._transports.ray.local_cluster SOCKET ...``, it starts Ray, sends
its address to every client that connects to SOCKET, and ends Ray and itself when the last of these
connections, the leases, is closed:

    STARTING ──(Ray runs)──> READY ───┬──(no lease left)──> ended
        └──(Ray failed)──> FAILED ────┘

In STARTING the clients wait; then each one is sent "ready ADDRESS" or "failed REASON".  Without
descriptors for more leases, clients wait in the listener's queue.

A client may send "keep SECONDS": the cluster then stays for so long without a lease (0: for ever),
until one sends "release".
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil

from rayrpc._transports.ray.node_start import adapt_start, start_monitors
from rayrpc._transports.ray.worker_forks import FORKS, forked_workers

__all__ = ["CHANGED", "KEEP", "LocalCluster", "READY", "RELEASE", "main"]

#: how the answer begins that a cluster runs; its address follows
READY = "ready "
#: what a client may send; seconds follow the first
KEEP, RELEASE = "keep", "release"
#: the answer to these, unless it was so before
CHANGED = "new"

logger = logging.getLogger(__name__)

# How long to wait for the first lease.
FIRST_LEASE_SECONDS = 30.0
# Without leases, how long to wait for a client that is just connecting.
LAST_LEASE_SECONDS = 1.0
# Without descriptors, how long to wait before the next try.
PAUSE_SECONDS = 0.1
# Ray gives its processes 30 s to start, which a busy machine may exceed.
START_ATTEMPTS = 3
# After which a cluster has monitors: by then, a program has started its workers, or has ended.
MONITORS_SECONDS = 30.0
# How long the system may take to end killed processes.
END_SECONDS = 10.0


class LocalCluster:
    """Answer the clients of the cluster, and hold their leases.

    Args:
        path (Path): of the UNIX socket to listen on; the suffix ``.lock`` is that of the file that
            a client locks while it connects.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_path = path.with_suffix(".lock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._leases: set[socket.socket] = set()
        self._has_accepted = True  # the last time
        self._answer: bytes | None = None  # None in STARTING
        self._kept: float | None = None  # for how long without leases, in seconds
        self._lock = threading.Lock()  # guards the leases and the answer

    def announce(self, answer: str) -> None:
        """Send the answer to all clients, also to those that connect later."""
        with self._lock:
            self._answer = f"{answer}\n".encode()
            for lease in self._leases:
                self._send_answer(lease)

    def _send_answer(self, lease: socket.socket) -> None:
        if self._answer is not None:
            with contextlib.suppress(OSError):  # the client ended; its end of file follows
                lease.sendall(self._answer)

    def run(self) -> None:
        """Serve clients; return when no lease is left."""
        timeout: float | None = FIRST_LEASE_SECONDS
        while True:
            ready = self._selector.select(timeout)
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._on_readable(key.fileobj)  # type: ignore[arg-type]
            is_kept = self._kept is not None and (ready or self._kept == 0)
            if not self._leases and not is_kept and self._remove_socket():
                return
            if self._leases:
                timeout = None
            else:
                timeout = LAST_LEASE_SECONDS if self._kept is None else self._kept or None

    def _accept(self) -> None:
        """Take a lease; an error ends that one alone."""
        try:
            lease, _ = self._listener.accept()
        except OSError as exc:  # out of descriptors, or the client has ended
            if self._has_accepted:
                logger.warning("could not accept a client, and try again: %s", exc)
            self._has_accepted = False
            time.sleep(PAUSE_SECONDS)
            return
        self._has_accepted = True
        try:
            self._selector.register(lease, selectors.EVENT_READ)
        except OSError as exc:
            logger.warning("closed the connection of a client: %s", exc)
            lease.close()
            return
        with self._lock:
            self._leases.add(lease)
            self._send_answer(lease)

    def _on_readable(self, lease: socket.socket) -> None:
        """Do what a client tells, or release the lease that it has closed."""
        with contextlib.suppress(OSError):
            if text := lease.recv(100):
                lease.sendall(f"{self._do(text.decode().split())}\n".encode())
                return
        self._selector.unregister(lease)
        with self._lock:
            self._leases.discard(lease)
        lease.close()

    def _do(self, words: list[str]) -> str:
        """Do what a client tells; return the answer."""
        before = self._kept
        match words:
            case [word, seconds] if word == KEEP:
                self._kept = float(seconds)
                return CHANGED if before is None else "old"
            case [word] if word == RELEASE:
                self._kept = None
                return "old" if before is None else CHANGED
        return "unknown"

    def _remove_socket(self) -> bool:
        """Remove the sockets' files, before another cluster may have its own there.

        Returns:
            False if a client is just connecting.
        """
        try:
            with self._lock_path.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._selector.select(0):
                    return False
                for path in (self._path, self._path.with_suffix(FORKS)):
                    path.unlink(missing_ok=True)
                return True
        except FileNotFoundError:  # no client finds it without its folder
            return True
        except OSError:  # a client holds the lock, or there is no descriptor
            return False


def main(arguments: list[str]) -> None:
    """Run a local cluster until it has no leases.

    Args:
        arguments: the socket's path, Ray's namespace, the number of CPUs (0: this machine's),
            and whether Ray's dashboard runs (0 or 1).
    """
    path, namespace, num_cpus, dashboard = arguments
    with forked_workers(Path(path).with_suffix(FORKS)) as server:
        cluster = LocalCluster(Path(path))
        done = threading.Thread(target=cluster.run)
        done.start()
        # in the main thread, as Ray's processes end with the thread that started them
        folder = Path(path).parent
        _start_ray(cluster, folder, namespace, int(num_cpus), bool(int(dashboard)), server)
        done.join(MONITORS_SECONDS)
        import ray

        if done.is_alive() and ray.is_initialized():
            start_monitors()
        done.join()
        ray.shutdown()


def _start_ray(
    cluster: LocalCluster,
    folder: Path,
    namespace: str,
    num_cpus: int,
    dashboard: bool,
    kept: int,
) -> None:
    """Start Ray, its files below the user's own folder, and announce how that ended."""
    import ray

    adapt_start(late_monitors=True)
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=num_cpus or os.cpu_count(),
                include_dashboard=dashboard,
                log_to_driver=False,
                _temp_dir=str(folder / "ray"),  # Ray opens it to all users
            )
        except Exception as exc:
            if "timed out during startup" in str(exc) and attempt + 1 < START_ATTEMPTS:
                logger.warning("start Ray again: %s", exc)
                _end_children(kept)
                continue
            cluster.announce(f"failed {type(exc).__name__}: {' '.join(str(exc).split())}")
        else:
            cluster.announce(f"{READY}{ray.get_runtime_context().gcs_address}")
        return


def _end_children(kept: int) -> None:
    """End the processes of Ray that this one has started; Ray leaves those that started late."""
    children = [p for p in psutil.Process().children(recursive=True) if p.pid != kept]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, END_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1:])
