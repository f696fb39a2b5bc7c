"""A transport between workers of one process, for tests of everything above it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rayrpc._runtime.membership import Member
from rayrpc._runtime.messages import Frame
from rayrpc._runtime.outcome import Error
from rayrpc._runtime.threads import ThreadCache
from rayrpc._transports.base import Pending, PendingReply, Serve, Transport, copied
from rayrpc.errors import WorkerDiedError

__all__ = ["MemoryHub", "MemoryTransport"]


class MemoryHub:
    """Where the transports of one process find one another."""

    def __init__(self) -> None:
        self.serving: dict[str, Serve] = {}


class MemoryTransport(Transport):
    """Call peers of the same process by a thread each.

    Args:
        hub (MemoryHub): shared by the transports that can reach one another.
        address (str): this worker's address on the hub.
    """

    name = "memory"

    def __init__(self, hub: MemoryHub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._threads = ThreadCache(f"rayrpc-memory-{address}")
        self._lock = threading.Lock()
        self._pending: dict[str, set[PendingReply]] = defaultdict(set)

    @property
    def address(self) -> Any:
        return self._address

    def start(self, serve: Serve, find: Callable[[int], Member | None]) -> None:
        self._hub.serving[self._address] = serve

    def call(self, peer: Member, frame: Frame) -> Pending:
        pending = PendingReply()
        serve = self._hub.serving.get(peer.address)
        if serve is None:
            pending.complete(Error(WorkerDiedError(peer.name, "it does not serve", peer.node)))
            return pending
        arrived = copied(frame)
        with self._lock:
            self._pending[peer.token].add(pending)

        def run() -> None:
            pending.serve(serve, arrived)
            with self._lock:
                self._pending[peer.token].discard(pending)

        self._threads.submit(run)
        return pending

    def lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            pending = self._pending.pop(peer.token, set())
        for call in pending:
            call.complete(Error(error))

    def close(self) -> None:
        self._hub.serving.pop(self._address, None)
        self._threads.close()
