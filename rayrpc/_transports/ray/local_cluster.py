"""The process of a local Ray cluster.

Run as ``python -m rayrpc._transports.ray.local_cluster SOCKET ...``, it starts Ray, sends
its address to every client that connects to SOCKET, and ends Ray and itself when the last of these
connections, the leases, is closed:

    STARTING ──(Ray runs)──> READY ───┬──(no lease left)──> ended
        └──(Ray failed)──> FAILED ────┘

In STARTING the clients wait; then each one is sent "ready ADDRESS" or "failed REASON".  Without
descriptors for more leases, clients wait in the listener's queue.
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

__all__ = ["main"]

logger = logging.getLogger(__name__)

# How long to wait for the first lease.
FIRST_LEASE_SECONDS = 30.0
# Without leases, how long to wait for a client that is just connecting.
LAST_LEASE_SECONDS = 1.0
# Without descriptors, how long to wait before the next try.
PAUSE_SECONDS = 0.1
# Ray gives its processes 30 s to start, which a busy machine may exceed.
START_ATTEMPTS = 3
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
            if not self._leases and self._remove_socket():
                return
            timeout = None if self._leases else LAST_LEASE_SECONDS

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
        """Release a lease that its client closed."""
        with contextlib.suppress(OSError):
            if lease.recv(1):
                return
        self._selector.unregister(lease)
        with self._lock:
            self._leases.discard(lease)
        lease.close()

    def _remove_socket(self) -> bool:
        """Remove the socket's file; return False if a client is just connecting."""
        try:
            with self._lock_path.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._selector.select(0):
                    return False
                self._path.unlink(missing_ok=True)
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
    cluster = LocalCluster(Path(path))
    done = threading.Thread(target=cluster.run)
    done.start()
    # in the main thread, as Ray's processes end with the thread that started them
    _start_ray(cluster, Path(path).parent, namespace, int(num_cpus), bool(int(dashboard)))
    done.join()
    import ray

    ray.shutdown()


def _start_ray(
    cluster: LocalCluster, folder: Path, namespace: str, num_cpus: int, dashboard: bool
) -> None:
    """Start Ray, its files below the user's own folder, and announce how that ended."""
    import ray

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
                _end_children()
                continue
            cluster.announce(f"failed {type(exc).__name__}: {' '.join(str(exc).split())}")
        else:
            cluster.announce(f"ready {ray.get_runtime_context().gcs_address}")
        return


def _end_children() -> None:
    """End the processes of Ray that this one has started; Ray leaves those that started late."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, END_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1:])
