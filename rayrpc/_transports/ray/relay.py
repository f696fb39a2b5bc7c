"""The relay: the actor endpoint of an attached process.

Peers call the relay; the process takes their calls from it by long poll and sends the results
back:

    peer ──handle(frame)──> relay ──(exchange returns)──> process ──exchange(results)──> relay
                                                                 the peer's handle returns

A call is HELD (the relay's thread waits for the result, and returns it) while threads are free,
and else DEFERRED (the callee calls the caller's ``deliver``).

An exchange whose connection breaks is repeated under its number, and returns the same frames.

At most two exchanges are open: while one thread of the process runs the calls that its exchange
returned, the exchange of another waits in the relay for the next calls.

Torch is never imported here.
"""

from __future__ import annotations

import queue
import threading
import time

import ray

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._transports.ray.endpoint import DEFERRED, LivenessWatch, Wire, passed_on
from rayrpc._transports.ray.raylet_watch import end_with_raylet

__all__ = ["RELAY_GROUPS", "Relay"]

# Threads by concurrency group. The last free thread of "rpc" never holds a call.
RELAY_GROUPS = {"rpc": 16, "system": 4, "poll": 4, "watch": 4, "inspect": 1}

# How many frames an exchange returns at most.
MAX_ITEMS = 64
DRAIN_POLL_SECONDS = 0.002


class _HeldCall:
    """A peer's call that waits in the relay for its reply."""

    __slots__ = ("done", "wire")

    def __init__(self) -> None:
        self.done = threading.Lock()  # released when the reply is there
        self.done.acquire()
        self.wire: Wire = None


class _Exchange:
    """An exchange, which may be repeated."""

    __slots__ = ("items", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: list[tuple[str, int | None, Wire]] | None = None  # once it has returned


class Relay:
    """Receive the calls for a process that is no actor.

    Args:
        worker (str): the name of the process's worker.
        joined (None): an ObjectRef that is ready when the worker has joined its group; Ray starts
            no actor before its arguments are ready.
        plain (bool): the process uses Ray Client.
    """

    def __init__(self, worker: str, joined: None, plain: bool) -> None:
        end_with_raylet()
        self._worker = worker
        self._plain = plain
        self._incoming: queue.SimpleQueue[tuple[str, int | None, Wire]] = queue.SimpleQueue()
        self._held: dict[int, _HeldCall] = {}
        self._count = 0  # held calls so far
        self._exchanges: dict[int, _Exchange] = {}  # not known to have arrived; by number
        self._busy = 0  # held calls now
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
                number, held = self._hold()
        wire = passed_on(wire, self._plain)
        if held is None:
            self._incoming.put(("call", None, wire))
            return DEFERRED
        self._incoming.put(("call", number, wire))
        held.done.acquire()
        with self._lock:
            self._busy -= 1
        return held.wire

    def _hold(self) -> tuple[int, _HeldCall]:
        """Add a held call, with the lock held; return its number, too."""
        self._count += 1
        held = self._held[self._count] = _HeldCall()
        return self._count, held

    @ray.method(concurrency_group="inspect")
    def inspect(self, wire: Wire, seconds: float) -> Wire:
        """Pass a question about the worker to the process; return its answer.

        Args:
            wire: an INSPECT frame.
            seconds: how long the process may take; the answer is None if it takes longer.
        """
        with self._lock:
            number, held = self._hold()
        self._incoming.put(("call", number, passed_on(wire, self._plain)))
        if not held.done.acquire(timeout=seconds):
            self._held.pop(number, None)
        return held.wire

    @ray.method(concurrency_group="system")
    def deliver(self, call_id: int, wire: Wire) -> None:
        """Pass the late reply to a call of the process."""
        self._incoming.put(("reply", call_id, passed_on(wire, self._plain)))

    @ray.method(concurrency_group="poll")
    def exchange(
        self, number: int, arrived: list[int], results: list[tuple[int, Wire]]
    ) -> list[tuple[str, int | None, Wire]]:
        """Take results of the process; wait for frames for it.

        Args:
            number: of the exchange; the same if it is repeated.
            arrived: numbers of exchanges whose frames have arrived.
            results: replies by the number of the held call.

        Returns:
            Per frame: "call" and the number of the held call (None: deferred), or "reply" and the
            id of the process's own call; and the frame.
        """
        self._forget(arrived)
        exchange = self._exchanges.setdefault(number, _Exchange())
        self._complete(results)
        with exchange.lock:
            if exchange.items is None:
                exchange.items = self._take()
            return exchange.items

    def _take(self) -> list[tuple[str, int | None, Wire]]:
        items = [self._incoming.get()]
        while len(items) < MAX_ITEMS:
            try:
                items.append(self._incoming.get_nowait())
            except queue.Empty:
                break
        return items

    @ray.method(concurrency_group="system")
    def note_arrived(self, numbers: list[int]) -> None:
        """Forget the frames of exchanges: they have arrived."""
        self._forget(numbers)

    @ray.method(concurrency_group="system")
    def give(self, results: list[tuple[int, Wire]]) -> None:
        """Take results of the process; see ``exchange``."""
        self._complete(results)

    @ray.method(concurrency_group="system")
    def close(self, token: str, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the replies of held calls; end the membership."""
        deadline = Deadline(timeout)
        while self._busy and not deadline.expired:
            time.sleep(DRAIN_POLL_SECONDS)
        self._watch.release(token)

    @ray.method(concurrency_group="watch")
    def watch(self, token: str) -> None:
        """Block until the worker leaves; fail if it dies."""
        self._watch.wait(token)

    def _forget(self, exchanges: list[int]) -> None:
        for number in exchanges:
            self._exchanges.pop(number, None)

    def _complete(self, results: list[tuple[int, Wire]]) -> None:
        for number, wire in results:
            held = self._held.pop(number, None)
            if held is not None:
                held.wire = passed_on(wire)
                held.done.release()
