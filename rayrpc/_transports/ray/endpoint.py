"""Actor endpoints: the Ray actors that peers call to reach a worker.

A hosted worker's endpoint is its own actor (``HostedEndpoint`` here); an attached process has a
``Relay``.  All have the same methods, and their addresses are ``Address``:

    handle(wire)             serve a frame; return the reply, or DEFERRED if it comes later
    deliver(call_id, wire)   take the late reply to a call of this worker
    watch(token)             block until the worker leaves; fail if it dies (``LivenessWatch``)
    inspect(wire, seconds)   serve an INSPECT frame; return the reply, or None if it takes too long

A deferred reply is sent by the callee with the caller's ``deliver``: so a call that waits for
something holds no thread, and any number of calls can be open.

On the wire a frame is bytes, or a list of bytes and buffers, and last, in a tuple, references to
objects of the store.  To and from a process that uses Ray Client, whose pickles have no buffers, it
is a tuple of bytes, and of these.

The states of a hosted endpoint; calls wait in the first two and are refused in the last one:

    NEW ── reserve ──> RESERVED ── attach ──> SERVING ── detach ──> DETACHED
                           ^                                            │
                           └────────────────── reserve ─────────────────┘

Torch is never imported here.
"""

from __future__ import annotations

import pickle
import threading
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ray.exceptions import RayError

from rayrpc._concurrency.waiting import Event
from rayrpc._protocol.messages import Frame, Objects, flat
from rayrpc._transports.ray import ray_api
from rayrpc._transports.serving import ServingThreads
from rayrpc.errors import CallError

__all__ = [
    "ATTACH_SECONDS",
    "Address",
    "DEFERRED",
    "EndpointServer",
    "HostedEndpoint",
    "LivenessWatch",
    "Wire",
    "from_wire",
    "hosted_endpoint",
    "passed_on",
    "to_wire",
]

#: bytes, a list of bytes and buffers and perhaps a tuple, or a tuple of these
Wire = Any

#: in place of a reply that comes later
DEFERRED = None

# How long a call waits for a worker that is admitted to its group, but does not serve yet.
ATTACH_SECONDS = 10.0


class Address(NamedTuple):
    """How peers reach a worker.

    It holds names, no handles: a handle can be unpickled only while its program runs, and a
    worker's address may be used after its end.

    Args:
        actor (str): name of its actor endpoint.
        namespace (str): where Ray knows that name.
    """

    actor: str
    namespace: str

    def find(self) -> Any:
        """Return a handle of the actor endpoint; ValueError if it has ended."""
        try:
            return ray_api.get_actor(self.actor, namespace=self.namespace)
        except (AssertionError, RayError) as exc:  # it was just ending
            raise ValueError(str(exc)) from exc


def to_wire(frame: Frame, plain: bool = False) -> Wire:
    """Return the form of a frame that Ray sends fastest.

    Args:
        frame: to send.
        plain: the sender or the receiver uses Ray Client.
    """
    head = frame.pack()
    objects = () if frame.objects is None else (tuple(frame.objects),)
    if plain:
        return _plain([head, *map(flat, frame.buffers), *objects])
    if not (frame.buffers or objects):
        return head
    return [head, *(pickle.PickleBuffer(flat(buffer)) for buffer in frame.buffers), *objects]


def from_wire(wire: Wire) -> Frame:
    """Return the frame that ``to_wire`` encoded."""
    if isinstance(wire, bytes):
        return Frame.unpack(wire)
    if type(wire[-1]) is tuple:
        return Frame.unpack(wire[0], wire[1:-1], Objects(*wire[-1]))
    return Frame.unpack(wire[0], wire[1:])


def passed_on(wire: Wire, plain: bool = False) -> Wire:
    """Return a received wire form in one that Ray can send again."""
    if isinstance(wire, list):
        return _plain(wire) if plain else [wire[0], *map(_passed_on, wire[1:])]
    return wire


def _passed_on(part: Any) -> Any:
    return part if type(part) is tuple else pickle.PickleBuffer(part)


def _plain(parts: list[Any]) -> tuple[Any, ...]:
    return tuple(part if type(part) is tuple else bytes(part) for part in parts)


class LivenessWatch:
    """Block the calls of ``watch`` until their worker leaves.

    If the process dies first, Ray fails them: so the directory learns of the death.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, Event] = {}

    def _event(self, token: str) -> Event:
        with self._lock:
            result = self._events.setdefault(token, Event())
        return result

    def wait(self, token: str) -> None:
        """Block until the membership with this token ends."""
        self._event(token).wait()

    def release(self, token: str) -> None:
        """Unblock the threads that wait for a token."""
        self._event(token).set()


class EndpointServer(Protocol):
    """What a hosted endpoint needs of its worker's transport."""

    def answer(self, wire: Wire, may_block: bool) -> Wire:
        """Serve a peer's frame in this thread.

        Args:
            wire: the frame.
            may_block: this thread may be kept for as long as the user's function runs.

        Returns:
            The reply, or DEFERRED.
        """

    def on_reply(self, call_id: int, wire: Wire) -> None:
        """Complete a call of this worker with its deferred reply."""


class EndpointState(Enum):
    """The state of a hosted endpoint; see the drawing above."""

    NEW = "new"
    RESERVED = "reserved"
    SERVING = "serving"
    DETACHED = "detached"


class HostedEndpoint:
    """The actor endpoint of a hosted worker; the actor forwards its calls to it.

    A transport attaches itself while its worker is in a group.

    Args:
        name (str): the actor's.
        threads (int): size of the concurrency group that serves calls.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.watch = LivenessWatch()
        self._threads = threads
        self._serving = ServingThreads()
        self._lock = threading.Lock()
        self._state = EndpointState.NEW
        self._decided = Event()  # set in SERVING and DETACHED
        self._server: EndpointServer | None = None  # in SERVING

    def reserve(self) -> HostedEndpoint | None:
        """Keep the endpoint for one transport, and let calls wait until it attaches.

        Returns:
            None if another transport has it.
        """
        with self._lock:
            if self._state in (EndpointState.RESERVED, EndpointState.SERVING):
                return None
            self._state = EndpointState.RESERVED
            self._decided.clear()
        return self

    def attach(self, server: EndpointServer) -> None:
        """Serve calls by ``server`` from now on."""
        with self._lock:
            self._state = EndpointState.SERVING
            self._server = server
            self._decided.set()

    def detach(self) -> None:
        """Refuse calls from now on."""
        with self._lock:
            self._state = EndpointState.DETACHED
            self._server = None
            self._decided.set()

    def call(self, wire: Wire) -> Wire:
        """Serve a peer's frame in this thread of the actor.

        Raises:
            CallError: the worker is in no group.
        """
        # a peer that was admitted at the same time may call before this worker's init_rpc returns
        self._decided.wait(ATTACH_SECONDS)
        server = self._server
        if server is None:
            raise CallError(
                "the worker that was called has left its group, or has not joined it yet"
            )
        self._serving.begin()
        try:
            return server.answer(wire, may_block=len(self._serving) < self._threads)
        finally:
            self._serving.end()

    def flush_replies(self, timeout: float) -> None:
        """Wait until the calls that other threads serve are replied to.

        Args:
            timeout: in seconds.
        """
        self._serving.wait_for_others(timeout)

    def deliver(self, call_id: int, wire: Wire) -> None:
        """Take the late reply to a call of this worker."""
        server = self._server
        if server is not None:
            server.on_reply(call_id, wire)


_hosted: HostedEndpoint | None = None


def hosted_endpoint(endpoint: HostedEndpoint | None = None) -> HostedEndpoint | None:
    """Return this process's endpoint, None if it is no worker's actor; set it if one is given."""
    global _hosted
    if endpoint is not None:
        _hosted = endpoint
    return _hosted
