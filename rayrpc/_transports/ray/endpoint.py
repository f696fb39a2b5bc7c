"""Where the calls to a worker that is itself an actor arrive."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rayrpc._transports.ray.relay import LivenessWatch, Wire
from rayrpc.errors import CallError

if TYPE_CHECKING:
    from rayrpc._transports.ray.transport import RayTransport

__all__ = ["HostedEndpoint", "hosted_endpoint"]

# How long a call waits for a worker that is admitted to its group, but not serving yet.
PLUG_SECONDS = 10.0


class HostedEndpoint:
    """What the calls to a worker that is itself an actor arrive at.

    The actor forwards to it; a transport plugs itself in while its worker is in a group.

    Args:
        name (str): the actor's.
        threads (int): size of the concurrency group that serves calls.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.watch = LivenessWatch()
        self._threads = threads
        self._busy = 0
        self._lock = threading.Lock()
        self._transport: RayTransport | None = None
        self._plugged = threading.Event()
        self._taken = False

    def take(self) -> HostedEndpoint | None:
        """Let calls wait for the transport that asks for this; None if another has it."""
        with self._lock:
            if self._taken:
                return None
            self._taken = True
            self._plugged.clear()
        return self

    def plug(self, transport: RayTransport | None) -> None:
        """Serve by ``transport`` from now on; None: refuse calls."""
        with self._lock:
            self._transport = transport
            self._taken = transport is not None
            self._plugged.set()

    def call(self, wire: Wire) -> Wire:
        """Serve a peer's frame in this thread, which the actor gave."""
        # a peer that was admitted with us may call before our init_rpc has returned
        self._plugged.wait(PLUG_SECONDS)
        transport = self._transport
        if transport is None:
            raise CallError("RPC is not running in this process (any more)")
        with self._lock:
            self._busy += 1
            may_block = self._busy < self._threads
        try:
            return transport._answer(wire, may_block)
        finally:
            with self._lock:
                self._busy -= 1

    def deliver(self, call_id: int, wire: Wire) -> None:
        """Take the late reply to a call of this worker."""
        if self._transport is not None:
            self._transport._arrived(call_id, wire)


_hosted: HostedEndpoint | None = None


def hosted_endpoint(endpoint: HostedEndpoint | None = None) -> HostedEndpoint | None:
    """Return the endpoint of this process, which is set once if it is a worker's actor."""
    global _hosted
    if endpoint is not None:
        _hosted = endpoint
    return _hosted
