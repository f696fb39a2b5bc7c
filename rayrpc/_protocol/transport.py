"""The seams below the runtime: a transport carries frames, a directory knows the members.

A transport carries frames between the workers of a group.  Whatever it is made of, it promises:

- every ``call`` ends exactly once, with the callee's reply or with an error of ``errors``;
- frames to one peer may overtake one another; none is delivered twice;
- a peer that dies ends the calls to it at once, with ``WorkerDiedError``;
- serving never blocks sending, and the other way round.
"""

from __future__ import annotations

import abc
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rayrpc._concurrency.outcome import Outcome, Value
from rayrpc._protocol.membership import Change, Member, Snapshot
from rayrpc._protocol.messages import Frame, Kind, flat
from rayrpc.errors import CallError

__all__ = [
    "Deferred",
    "Directory",
    "Pending",
    "PendingReply",
    "Serve",
    "Transport",
    "copied",
    "served",
]


logger = logging.getLogger(__name__)


class Deferred:
    """A reply that will come later, from another thread."""

    __slots__ = ("_callback", "_frame", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame: Frame | None = None
        self._callback: Callable[[Frame], None] | None = None

    def set(self, frame: Frame) -> None:
        """Give the reply."""
        with self._lock:
            self._frame = frame
            callback = self._callback
        if callback is not None:
            callback(frame)

    def on_done(self, callback: Callable[[Frame], None]) -> None:
        """Call ``callback`` with the reply, now if it is there."""
        with self._lock:
            self._callback = callback
            frame = self._frame
        if frame is not None:
            callback(frame)


class Serve(Protocol):
    """What answers frames: the callee."""

    def __call__(self, frame: Frame, may_block: bool = True) -> Frame | Deferred:
        """Answer a frame.

        Args:
            frame: what a peer asks.
            may_block: this thread may be kept for as long as the user's function runs.
        """


class Pending(abc.ABC):
    """A call on its way; wait for it, or be called back, but not both."""

    @abc.abstractmethod
    def wait(self, timeout: float | None) -> Frame:
        """Return the reply.

        Raises:
            TimeoutError: it did not come in ``timeout`` seconds; the call goes on.
            CallError: there will be none.
        """

    @abc.abstractmethod
    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        """Call ``callback`` once, from any thread; it must not block.

        Args:
            callback: takes the reply or an error.
            urgent: somebody waits for it; else it may come along with other replies, after some
                milliseconds.
        """


class PendingReply(Pending):
    """A pending call that somebody completes by hand."""

    __slots__ = ("_callback", "_done", "_lock", "_outcome")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: threading.Event | None = None
        self._outcome: Outcome[Frame] | None = None
        self._callback: Callable[[Outcome[Frame]], None] | None = None

    def complete(self, outcome: Outcome[Frame]) -> bool:
        """End the call; later ones change nothing, and return False."""
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            done, callback = self._done, self._callback
        if done is not None:
            done.set()
        if callback is not None:
            callback(outcome)
        return True

    def wait(self, timeout: float | None) -> Frame:
        with self._lock:
            if self._outcome is None:
                self._done = threading.Event()
        if self._done is not None and not self._done.wait(timeout):
            raise TimeoutError
        assert self._outcome is not None
        return self._outcome.unwrap()

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        with self._lock:
            self._callback = callback
            outcome = self._outcome
        if outcome is not None:
            callback(outcome)

    def serve(self, serve: Serve, frame: Frame) -> None:
        """Complete this call with what ``serve`` in this process answers to ``frame``."""
        reply = served(serve, frame)
        if isinstance(reply, Deferred):
            reply.on_done(lambda frame: void(self.complete(Value(copied(frame)))))
        else:
            self.complete(Value(copied(reply)))


def served(serve: Serve, frame: Frame, may_block: bool = True) -> Frame | Deferred:
    """Return what ``serve`` answers; if it fails itself, a reply that says so."""
    try:
        return serve(frame, may_block)
    except BaseException as exc:
        logger.exception("a call could not be served")
        text = f"the call could not be served: {type(exc).__name__}: {exc}"
        remote: tuple[Any, ...] = (text, pickle.dumps(CallError), "CallError", {})
        return Frame(Kind.ERROR, frame.session, -1, frame.call_id, data=pickle.dumps(remote, 5))


def copied(frame: Frame) -> Frame:
    """Return what a receiver in the same process gets: memory of its own."""
    return Frame.unpack(frame.pack(), [bytearray(flat(buffer)) for buffer in frame.buffers])


def void(_: object) -> None:
    """Turn a result into none."""


class Transport(abc.ABC):
    """Carry frames between this worker and its peers."""

    #: what it is called in settings and logs
    name: str

    @property
    @abc.abstractmethod
    def address(self) -> Any:
        """What peers need to reach this worker; goes into its ``Member`` record."""

    @property
    def node(self) -> str:
        """Address of this worker's node, for error messages."""
        return ""

    @abc.abstractmethod
    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        """Serve calls from now on.

        Args:
            serve: answers a frame; it may block as long as the user's function does.
            find: returns the peer with a worker id, if it is in the group.
            secret: what only members of the group know.
        """

    @abc.abstractmethod
    def call(self, peer: Member, frame: Frame) -> Pending:
        """Send a frame to a peer, and expect its reply."""

    @abc.abstractmethod
    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        """End the calls to a peer that is known to be gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop serving and sending; idempotent."""


class Directory(abc.ABC):
    """The rendezvous of a group: unique names and ids, who is alive, barriers."""

    @abc.abstractmethod
    def join(self, member: Member, timeout: float) -> Snapshot:
        """Join the group; wait until it is complete.

        Raises:
            GroupError: the group refuses the member, or is not complete in ``timeout`` seconds.
        """

    @abc.abstractmethod
    def follow(self, version: int, apply: Callable[[list[Change]], None]) -> None:
        """Call ``apply`` with every change after ``version``, in order, until ``close``."""

    @abc.abstractmethod
    def members(self) -> list[Member]:
        """Return who is in the group right now."""

    @abc.abstractmethod
    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        """Wait until every member that is left reports at ``tag``; return the reports by name.

        Raises:
            GroupError: some member did not in ``timeout`` seconds.
        """

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the group; the others learn of it at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop following; idempotent."""
