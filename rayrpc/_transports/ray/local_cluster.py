"""The keeper of a local Ray cluster: ``python -m rayrpc._transports.ray.local_cluster SOCKET ...``.

It starts Ray, tells its address to every process that connects to SOCKET, and ends Ray and
itself when the last of these connections is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path

__all__ = ["main"]

FIRST_SECONDS = 30.0


class LocalCluster:
    """Count the processes that need the cluster.

    Args:
        path (Path): of the socket that they connect to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_path = path.with_suffix(".lock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._tenants: set[socket.socket] = set()
        self._answer: bytes | None = None
        self._answer_lock = threading.Lock()

    def announce(self, answer: str) -> None:
        """Answer all processes that connected, and those that will."""
        with self._answer_lock:
            self._answer = f"{answer}\n".encode()
            for tenant in self._tenants:
                self._tell(tenant)

    def _tell(self, tenant: socket.socket) -> None:
        if self._answer is not None:
            with contextlib.suppress(OSError):  # it is gone; its end of file follows
                tenant.sendall(self._answer)

    def run(self) -> None:
        """Return when no process needs the cluster any more."""
        timeout: float | None = FIRST_SECONDS
        while True:
            ready = self._selector.select(timeout)
            # without tenants, look again soon: somebody may just be connecting
            timeout = None if self._tenants else 1.0
            for key, _ in ready:
                if key.fileobj is self._listener:
                    tenant, _ = self._listener.accept()
                    self._selector.register(tenant, selectors.EVENT_READ)
                    with self._answer_lock:
                        self._tenants.add(tenant)
                        self._tell(tenant)
                else:
                    self._left(key.fileobj)  # type: ignore[arg-type]
            if not self._tenants and self._retire():
                return

    def _left(self, tenant: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if tenant.recv(1):
                return
        self._selector.unregister(tenant)
        with self._answer_lock:
            self._tenants.discard(tenant)
        tenant.close()

    def _retire(self) -> bool:
        """Withdraw the socket, unless somebody is just connecting."""
        with self._lock_path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if self._selector.select(0):
                return False
            self._path.unlink(missing_ok=True)
            return True


def main(arguments: list[str]) -> None:
    """Keep a cluster until nobody needs it.

    Args:
        arguments: the socket's path, Ray's namespace, the number of CPUs (0: this machine's),
            and whether Ray's dashboard runs (0 or 1).
    """
    path, namespace, num_cpus, dashboard = arguments
    keeper = LocalCluster(Path(path))
    done = threading.Thread(target=keeper.run)
    done.start()
    # in the main thread: Ray's processes end with the thread that started them
    _start_ray(keeper, namespace, int(num_cpus), bool(int(dashboard)))
    done.join()
    import ray

    ray.shutdown()


def _start_ray(keeper: LocalCluster, namespace: str, num_cpus: int, dashboard: bool) -> None:
    import ray

    try:
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=num_cpus or os.cpu_count(),
            include_dashboard=dashboard,
            log_to_driver=False,
        )
    except Exception as exc:
        keeper.announce(f"failed {type(exc).__name__}: {' '.join(str(exc).split())}")
    else:
        keeper.announce(f"ready {ray.get_runtime_context().gcs_address}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1:])
