"""The relay: the actor endpoint of an attached process.

Peers call the relay; the process takes their calls from it by long poll and sends the results
back:

    peer ──handle(frame)──> relay ──(exchange returns)──> process ──exchange(results)──> relay
                                                                 the peer's handle returns

A call is HELD (the relay's thread waits for the result, and returns it) while threads are free,
and else DEFERRED (the callee calls the caller's ``deliver``), as soon as the process has its frame.

An exchange whose connection breaks is repeated under its number, and returns the same frames.

Ray starts a relay again that dies.  The calls that it held have then failed for their callers, as
have those whose frames the process did not get; its first exchange tells the process, whose late
replies may be lost.

At most two exchanges are open: while one thread of the process runs the calls that its exchange
returned, the exchange of another waits in the relay for the next calls.

Torch is never imported here.
"""

from __future__ import annotations

import inspect
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.endpoint import DEFERRED, LivenessWatch, Wire, passed_on
from rayrpc._transports.ray.raylet_watch import end_with_raylet

__all__ = ["RELAY_GROUPS", "Relay"]

F = TypeVar("F", bound=Callable[..., Any])

# Ray Client's own decorator refuses options that the server, where the relay runs, knows.
_method: Callable[..., Callable[[F], F]] = inspect.unwrap(ray.method)

# Threads by concurrency group.
RELAY_GROUPS = {"rpc": 16, "system": 4, "poll": 4, "watch": 4, "inspect": 1}
# How many threads of "rpc" hold calls at most; the others defer them.
MAX_HELD = 12

# How many frames an exchange returns at most.
MAX_ITEMS = 64
DRAIN_POLL_SECONDS = 0.002


#: "call", the number of the held call (None: deferred) and its frame; "reply", the id of the
#: process's own call and its frame; or "restarted"
Item = tuple[str, int | None, Wire]


class _WaitingCall:
    """A peer's call that waits in the relay: for its reply, or until the process has its frame."""

    __slots__ = ("done", "wire")

    def __init__(self) -> None:
        self.done = threading.Lock()  # released when the wait is over
        self.done.acquire()
        self.wire: Wire = None


class _Exchange:
    """An exchange, which may be repeated."""

    __slots__ = ("deferred", "items", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: list[Item] | None = None  # once it has returned
        self.deferred: list[_WaitingCall] = []  # of ``items``


class Relay:
    """Receive the calls for a process that is no actor.

    Args:
        worker (str): the name of the process's worker.
        plain (bool): the process uses Ray Client.
    """

    def __init__(self, worker: str, plain: bool) -> None:
        end_with_raylet()
        self._worker = worker
        self._plain = plain
        # what the process will get; and the call that waits until it has
        self._incoming: queue.SimpleQueue[tuple[Item, _WaitingCall | None]] = queue.SimpleQueue()
        self._held: dict[int, _WaitingCall] = {}
        # number of the last held call; no relay that was there before has used the next ones
        self._number = random.getrandbits(60)
        self._exchanges: dict[int, _Exchange] = {}  # not known to have arrived; by number
        self._busy = 0  # held calls now
        self._lock = threading.Lock()
        self._watch = LivenessWatch()
        if ray_api.was_restarted():
            self._incoming.put((("restarted", None, b""), None))

    def __repr__(self) -> str:
        return f"rayrpc.Relay({self._worker})"

    @_method(concurrency_group="rpc")
    def handle(self, wire: Wire) -> Wire:
        """Pass a peer's frame to the process; return its reply, or DEFERRED."""
        with self._lock:
            is_held = self._busy < MAX_HELD
            if is_held:
                self._busy += 1
                number, held = self._hold()
        wire = passed_on(wire, self._plain)
        if not is_held:
            deferred = _WaitingCall()
            self._incoming.put((("call", None, wire), deferred))
            deferred.done.acquire()
            return DEFERRED
        self._incoming.put((("call", number, wire), None))
        held.done.acquire()
        with self._lock:
            self._busy -= 1
        return held.wire

    def _hold(self) -> tuple[int, _WaitingCall]:
        """Add a held call, with the lock held; return its number, too."""
        self._number += 1
        held = self._held[self._number] = _WaitingCall()
        return self._number, held

    @_method(concurrency_group="inspect")
    def inspect(self, wire: Wire, seconds: float) -> Wire:
        """Pass a question about the worker to the process; return its answer.

        Args:
            wire: an INSPECT frame.
            seconds: how long the process may take; the answer is None if it takes longer.
        """
        with self._lock:
            number, held = self._hold()
        self._incoming.put((("call", number, passed_on(wire, self._plain)), None))
        if not held.done.acquire(timeout=seconds):
            self._held.pop(number, None)
        return held.wire

    @_method(concurrency_group="system", max_task_retries=-1)
    def deliver(self, call_id: int, wire: Wire) -> None:
        """Pass the late reply to a call of the process."""
        self._incoming.put((("reply", call_id, passed_on(wire, self._plain)), None))

    @_method(concurrency_group="poll")
    def exchange(
        self, number: int, arrived: list[int], results: list[tuple[int, Wire]]
    ) -> list[Item]:
        """Take results of the process; wait for frames for it.

        Args:
            number: of the exchange; the same if it is repeated.
            arrived: numbers of exchanges whose frames have arrived.
            results: replies by the number of the held call.

        Returns:
            Frames, each as an ``Item``.
        """
        self._forget(arrived)
        exchange = self._exchanges.setdefault(number, _Exchange())
        self._complete(results)
        with exchange.lock:
            if exchange.items is None:
                taken = self._take()
                exchange.deferred = [call for _, call in taken if call is not None]
                exchange.items = [item for item, _ in taken]
            return exchange.items

    def _take(self) -> list[tuple[Item, _WaitingCall | None]]:
        taken = [self._incoming.get()]
        while len(taken) < MAX_ITEMS:
            try:
                taken.append(self._incoming.get_nowait())
            except queue.Empty:
                break
        return taken

    @_method(concurrency_group="poll")
    def note_arrived(self, numbers: list[int]) -> None:
        """Forget the frames of exchanges: they have arrived."""
        self._forget(numbers)

    @_method(concurrency_group="system")
    def give(self, results: list[tuple[int, Wire]]) -> None:
        """Take results of the process; see ``exchange``."""
        self._complete(results)

    @_method(concurrency_group="system")
    def close(self, token: str, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the replies of held calls; end the membership."""
        deadline = Deadline(timeout)
        while self._busy and not deadline.expired:
            time.sleep(DRAIN_POLL_SECONDS)
        self._watch.release(token)

    @_method(concurrency_group="watch")
    def watch(self, token: str) -> None:
        """Block until the worker leaves; fail if it dies."""
        self._watch.wait(token)

    def _forget(self, exchanges: list[int]) -> None:
        for number in exchanges:
            exchange = self._exchanges.pop(number, None)
            for call in exchange.deferred if exchange is not None else ():
                call.done.release()

    def _complete(self, results: list[tuple[int, Wire]]) -> None:
        for number, wire in results:
            held = self._held.pop(number, None)
            if held is not None:
                held.wire = passed_on(wire)
                held.done.release()
