"""The actors that stand for workers in Ray: torch is never imported here.

A *relay* stands for an attached process: peers call the relay, the process takes their calls
from it and gives back the results.

    peer ──handle(frame)──> relay ──(exchange returns)──> process ──exchange(results)──> relay
                                                                 the peer's handle returns

Two exchanges are under way at most times: while one thread of the process runs what its exchange
brought, another's waits in the relay for the next.

A frame travels as bytes, or as a list of bytes and buffers.  To and from a process that uses Ray
Client, whose pickles have no buffers, it is a tuple of bytes.  ``None`` in place of a reply says
that it comes later, by the caller's own ``deliver``: so replies that wait for something never
hold a thread, and any number of calls can be open.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from rayrpc._protocol.messages import Frame, flat

__all__ = [
    "Address",
    "DEFERRED",
    "DirectAddress",
    "RELAY_GROUPS",
    "Relay",
    "Wire",
    "from_wire",
    "to_wire",
]

#: bytes, a list of bytes and buffers, or a tuple of bytes
Wire = Any

DEFERRED = None

# Threads by concurrency group. Calls that find the last thread of "rpc" are never kept there.
RELAY_GROUPS = {"rpc": 16, "system": 4, "poll": 4, "watch": 4}


class DirectAddress(NamedTuple):
    """Where a worker accepts connections (``direct.py``).

    Args:
        node (str): Ray's id of its node.
        unix (str): name of a UNIX socket there; empty if none.
        host (str): address of the node.
        port (int): for peers on other nodes; 0 if none.
    """

    node: str
    unix: str
    host: str
    port: int


class Address(NamedTuple):
    """How peers reach a worker.

    It holds names, no handles: a handle can be unpickled only while its program runs, and news of
    a worker may arrive after its end.

    Args:
        actor (str): name of its stand-in.
        namespace (str): where Ray knows that name.
        connection (DirectAddress | None): where it accepts connections, if it does.
    """

    actor: str
    namespace: str
    connection: DirectAddress | None = None

    def find(self) -> Any:
        """Return a handle of the stand-in; ValueError if it has ended."""
        try:
            return ray.get_actor(self.actor, namespace=self.namespace)
        except (AssertionError, RayError) as exc:  # it was just ending
            raise ValueError(str(exc)) from exc


def to_wire(frame: Frame, plain: bool = False) -> Wire:
    """Return what Ray sends fastest: plain bytes where there are no buffers.

    Args:
        frame: to send.
        plain: Ray Client is on the way.
    """
    head = frame.pack()
    if plain:
        return _plain([head, *map(flat, frame.buffers)])
    if not frame.buffers:
        return head
    return [head, *(pickle.PickleBuffer(flat(buffer)) for buffer in frame.buffers)]


def from_wire(wire: Wire) -> Frame:
    """Return the frame that ``to_wire`` took."""
    if isinstance(wire, bytes):
        return Frame.unpack(wire)
    return Frame.unpack(wire[0], wire[1:])


def passed_on(wire: Wire, plain: bool = False) -> Wire:
    """Return a received wire in a form that Ray sends again."""
    if isinstance(wire, list):
        return _plain(wire) if plain else [wire[0], *map(pickle.PickleBuffer, wire[1:])]
    return wire


def _plain(parts: list[Any]) -> tuple[bytes, ...]:
    return tuple(bytes(part) for part in parts)


class LivenessWatch:
    """Block callers until a token is released; they learn of our death by the error they get."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, threading.Event] = {}

    def _event(self, token: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(token, threading.Event())

    def wait(self, token: str) -> None:
        """Block until ``release``."""
        self._event(token).wait()

    def release(self, token: str) -> None:
        """Let go of those that wait for a token."""
        self._event(token).set()


class _Held:
    """A peer's call that waits in the relay for its reply."""

    __slots__ = ("done", "wire")

    def __init__(self) -> None:
        self.done = threading.Lock()
        self.done.acquire()
        self.wire: Wire = None


class Relay:
    """Stand for a process that is no actor.

    Args:
        worker (str): the name of the worker that it stands for.
        joined (None): comes when the worker has joined its group; Ray starts no actor before
            its arguments are there.
        plain (bool): the process uses Ray Client.
    """

    def __init__(self, worker: str, joined: None, plain: bool) -> None:
        self._worker = worker
        self._plain = plain
        self._inbox: queue.SimpleQueue[tuple[str, int | None, Wire]] = queue.SimpleQueue()
        self._held: dict[int, _Held] = {}
        self._count = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._watch = LivenessWatch()

    def __repr__(self) -> str:
        return f"rayrpc.Relay({self._worker})"

    @ray.method(concurrency_group="rpc")
    def handle(self, wire: Wire) -> Wire:
        """Pass a peer's frame to the process; return its reply, or DEFERRED."""
        with self._lock:
            if self._busy >= RELAY_GROUPS["rpc"] - 1:
                held = None
            else:
                self._busy += 1
                self._count += 1
                number = self._count
                held = self._held[number] = _Held()
        wire = passed_on(wire, self._plain)
        if held is None:
            self._inbox.put(("call", None, wire))
            return DEFERRED
        self._inbox.put(("call", number, wire))
        held.done.acquire()
        with self._lock:
            self._busy -= 1
        return held.wire

    @ray.method(concurrency_group="system")
    def deliver(self, call_id: int, wire: Wire) -> None:
        """Pass the late reply to a call of the process."""
        self._inbox.put(("reply", call_id, passed_on(wire, self._plain)))

    @ray.method(concurrency_group="poll")
    def exchange(self, results: list[tuple[int, Wire]]) -> list[tuple[str, int | None, Wire]]:
        """Take results of the process; return what came in, as soon as something does."""
        self._settle(results)
        items = [self._inbox.get()]
        while len(items) < 64:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        return items

    @ray.method(concurrency_group="system")
    def give(self, results: list[tuple[int, Wire]]) -> None:
        """Take results of the process."""
        self._settle(results)

    @ray.method(concurrency_group="system")
    def close(self, token: str, patience: float) -> None:
        """Let peers have the replies that are under way, for ``patience`` seconds at most."""
        end = time.monotonic() + patience
        while self._busy and time.monotonic() < end:
            time.sleep(0.002)
        self._watch.release(token)

    @ray.method(concurrency_group="watch")
    def watch(self, token: str) -> None:
        """Block until the worker leaves; fail if it dies."""
        self._watch.wait(token)

    def _settle(self, results: list[tuple[int, Wire]]) -> None:
        for number, wire in results:
            held = self._held.pop(number, None)
            if held is not None:
                held.wire = passed_on(wire)
                held.done.release()
