"""Fork the worker processes of a Ray cluster from one that has their modules loaded.

Run as ``python fork_server.py DESCRIPTOR MODULE...``, with the descriptor of a listening UNIX
socket, it loads the modules, and serves ``start_worker.py``, which the raylet runs for each worker:

    start_worker ──request, descriptors 0, 1, 2──> fork server ──forks──> worker
          ↑                                             └─forks─> loader ──forks──> worker
          └────────────────────── confirmation ─────────────────────────────────────┘

A program says what the workers of its job need loaded, torch for example, for as long as it keeps
the connection.  They are forked by a *loader*, one for each such set: a process that has loaded it.
The connection ends without a confirmation where any of these processes fails; Ray then starts the
worker itself.  A worker confirms before it runs, which fails when nobody waits for it any more.

The fork server ends at the end of its stdin, and its loaders with it; workers go on.  None of them
loads Ray, whose C++ part reads the environment of its worker once, when it is loaded; and none
starts a thread.  It is run by its path, and imports nothing of rayrpc: workers would have it, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["ForkServer", "Request", "main"]

HEADER = struct.Struct("!II")  # as in start_worker
REQUEST_SECONDS = 5.0  # for a request to arrive
PAUSE_SECONDS = 0.1  # after a failure, which may be one of all requests
MAX_LOADERS = 4
IDLE_SECONDS = 1.0  # after which a loader loads what may be of use


class Request(NamedTuple):
    """A request.

    Args:
        connection (socket.socket): with the rest of the request, and for the confirmation.
        descriptors (list[int]): of a worker's stdin, stdout and stderr; empty: no worker is wanted.
        length (int): of the rest, which describes the worker, in bytes.
        wanted (dict): what is asked for.
    """

    connection: socket.socket
    descriptors: list[int]
    length: int
    wanted: dict[str, Any]

    @staticmethod
    def read(connection: socket.socket) -> Request:
        """Return what a client asks for."""
        connection.settimeout(REQUEST_SECONDS)
        header, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, 3)
        request = Request(connection, list(descriptors), 0, {})
        try:
            if len(header) != HEADER.size:
                raise ValueError("not a request of start_worker")
            first, rest = HEADER.unpack(header)
            if len(descriptors) != (3 if rest else 0):
                raise ValueError("a request without the descriptors of a worker")
            return request._replace(length=rest, wanted=json.loads(_receive(connection, first)))
        except BaseException:
            request.close()
            raise

    def send(self, to: socket.socket) -> None:
        """Hand over to a loader."""
        descriptors = [self.connection.fileno(), *self.descriptors]
        socket.send_fds(to, [HEADER.pack(0, self.length)], descriptors)

    @staticmethod
    def receive(pair: socket.socket) -> Request | None:
        """Return what the fork server hands over next; None: it has ended."""
        header, descriptors, _, _ = socket.recv_fds(pair, HEADER.size, 4)
        if not header:
            return None
        connection = socket.socket(fileno=descriptors[0])
        connection.settimeout(REQUEST_SECONDS)
        return Request(connection, list(descriptors[1:]), HEADER.unpack(header)[1], {})

    def confirm(self) -> None:
        """Tell the client that it has what it asked for."""
        with contextlib.suppress(OSError):  # it does not wait
            self.connection.sendall(b"1")

    def close(self) -> None:
        """Close what the worker has now, or will never have."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def become(self) -> None:
        """Be the worker, in a process that was forked for it."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        worker = json.loads(_receive(self.connection, self.length))
        for target, descriptor in enumerate(self.descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        _enter(worker)
        _renew_secrets()
        self.connection.sendall(b"1")  # fails if nobody waits any more
        self.connection.close()
        command = worker["command"]
        sys.argv[:] = command
        sys.orig_argv[:] = [sys.executable, *command]
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the request of a worker ended early")
        data += part
    return data


def _enter(worker: dict[str, Any]) -> None:
    """Take over what a process inherits from the raylet."""
    os.environ.clear()
    os.environ.update(worker["environ"])
    os.chdir(worker["cwd"])
    if worker["leads_group"]:
        os.setpgid(0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(worker["oom_score_adj"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, worker["nice"])
    for name, limit in worker["limits"].items():
        number = getattr(resource, name)
        if resource.getrlimit(number) != tuple(limit):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, tuple(limit))
    if signal.SIGINT not in worker["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in worker["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, worker["blocked"])


def _renew_secrets() -> None:
    """Draw anew what was drawn when modules were loaded; ``random`` does so itself."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


class ForkServer:
    """Serve the requests of one cluster.

    Args:
        listener (socket.socket): of requests.
        end (int): a descriptor; at its end of file the fork server ends.
    """

    def __init__(self, listener: socket.socket, end: int) -> None:
        self._listener = listener
        self._end = end
        self._loaders: dict[str, socket.socket] = {}  # by what they load; the last used last
        self._failed: set[str] = set()  # what could not be loaded
        self._needs: dict[socket.socket, dict[str, Any]] = {}  # of jobs, by their connections

    def run(self) -> Callable[[], None] | None:
        """Serve; return at the end.

        Returns:
            In the server None; in a process that it has forked, what that shall do.
        """
        while True:
            pairs = self._loaders.values()
            sources: list[Any] = [self._listener, self._end, *pairs, *self._needs]
            ready, _, _ = select.select(sources, [], [])
            for what, pair in list(self._loaders.items()):
                if pair in ready:  # it has ended by itself
                    self._drop(what)
                    self._failed.add(what)
            for connection in [each for each in self._needs if each in ready]:
                del self._needs[connection]
                connection.close()
            if self._end in ready:
                return None
            if self._listener in ready and (child := self._accept()) is not None:
                return child

    def _accept(self) -> Callable[[], None] | None:
        """Serve one request; return as ``run``."""
        request = child = None
        try:
            connection, _ = self._listener.accept()
            request = Request.read(connection)
            if "cluster" in request.wanted and "load" in request.wanted:
                self._needs[connection] = request.wanted
                request.confirm()
                return None
            pair, child = self._loader(request)
            if pair is not None:
                request.send(pair)
            elif child is None and request.descriptors and os.fork() == 0:
                self._close()
                return request.become
        except Exception as exc:  # Ray starts that worker
            print(f"a request failed: {exc!r}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)
        if request is not None:
            request.close()
        return child

    def _loader(self, request: Request) -> tuple[socket.socket | None, Callable[[], None] | None]:
        """Return the connection to a loader, if one is to serve; and in a new one what to do."""
        load = request.wanted.get("load") or self._need(request.wanted)
        what = json.dumps(load, sort_keys=True)
        if load is None or what in self._failed:
            return None, None
        pair = self._loaders.pop(what, None)
        if pair is None:
            pair, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                pair.close()
                self._close()
                return None, lambda: _run_loader(other, load)
            other.close()
            pair.setblocking(False)  # for a loader that does not read any more
        self._loaders[what] = pair
        if len(self._loaders) > MAX_LOADERS:
            self._drop(next(iter(self._loaders)))
        return pair, None

    def _need(self, worker: dict[str, Any]) -> dict[str, Any] | None:
        """Return what a worker of a job needs loaded at present."""
        for each in self._needs.values():
            if (each["cluster"], each["job"]) == (worker["cluster"], worker["job"]):
                load: dict[str, Any] = each["load"]
                return load
        return None

    def _drop(self, what: str) -> None:
        """End a loader; it forks first what it was asked for."""
        self._loaders.pop(what).close()

    def _close(self) -> None:
        """Close what belongs to the server, in a process that it has forked."""
        self._listener.close()
        for each in (*self._loaders.values(), *self._needs):
            each.close()


def _run_loader(pair: socket.socket, what: dict[str, Any]) -> None:
    """Load, and fork the workers that need it; return in each of them when it has ended."""
    for name in list(os.environ):
        if name.startswith(tuple(what["read"])):
            del os.environ[name]
    os.environ.update(what["environ"])
    _load(what["modules"])
    for module, file in what["files"].items():
        if sys.modules[module].__file__ != file:
            print(f"{module} is not that of {file}", file=sys.stderr, flush=True)
            return
    later = list(what["later"])
    while True:
        timeout = IDLE_SECONDS if later else None
        if not select.select([pair], [], [], timeout)[0]:
            with contextlib.suppress(Exception):  # not each torch has all
                _load([later.pop(0)])
            continue
        request = Request.receive(pair)
        if request is None:
            return
        if not request.descriptors:
            request.confirm()
        elif os.fork() == 0:
            pair.close()
            return request.become()
        request.close()


def _load(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a worker would else copy what it shares with the others


def main(arguments: list[str]) -> None:
    """Serve one cluster, or be what was forked for it.

    Args:
        arguments: the descriptor of the listening socket, and modules.
    """
    sys.path.pop(0)  # this file's folder
    descriptor, *modules = arguments
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing to wait for
    _load(modules)
    become = ForkServer(socket.socket(fileno=int(descriptor)), sys.stdin.fileno()).run()
    if become is not None:
        become()


if __name__ == "__main__":
    main(sys.argv[1:])
