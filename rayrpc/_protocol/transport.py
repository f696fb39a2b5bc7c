"""The seams below the runtime: a transport carries frames, a directory knows the members.

A transport carries frames between the workers of a group.  Every implementation promises:

- every ``call`` ends exactly once, with the callee's reply or with an error of ``errors``;
- frames to one peer may overtake one another; none is delivered twice;
- when a peer dies, the calls to it end at once, with ``WorkerDiedError``;
- serving never blocks sending, and sending never blocks serving;
- a reply may travel by another transport than its request (``send_reply``, ``expect_reply``).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import pickle
from collections.abc import Callable
from typing import Any, Protocol

from rayrpc._concurrency.outcome import Outcome, Value, text_of
from rayrpc._concurrency.promise import OneShot, Promise
from rayrpc._protocol.membership import Address, Change, Member, Snapshot
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


def _begin_now(begin: Callable[[], object]) -> bool:
    return False


class Deferred(Promise[Frame]):
    """A reply that will be set later, by another thread."""

    __slots__ = ("hold",)

    def __init__(self) -> None:
        super().__init__()
        #: set by the transport; a call that waits for a thread asks it before it begins: it takes
        #: the beginning, to run it later, and returns True while the caller does not read replies
        self.hold: Callable[[Callable[[], object]], bool] = _begin_now

    def set(self, value: Frame) -> bool:
        """Set the reply; its buffers may change as soon as this returns."""
        if self._callbacks is None:
            value.keep_buffers()  # no transport has asked for it yet
        return super().set(value)


class Serve(Protocol):
    """Answers frames: the callee."""

    def __call__(self, frame: Frame, may_block: bool = True) -> Frame | Deferred:
        """Return the reply to a frame.

        Args:
            frame: a peer's request.
            may_block: the user's function may run in this thread, for as long as it takes.
        """


class Pending(abc.ABC):
    """A call under way; use either ``wait`` or ``on_done``, or ``on_done`` after a timeout."""

    @abc.abstractmethod
    def wait(self, timeout: float | None) -> Frame:
        """Return the reply.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it did not arrive in time; the call goes on.
            CallError: the call failed.
        """

    @abc.abstractmethod
    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        """Call ``callback`` once, from any thread; it must not block.

        Args:
            callback: takes the reply or an error.
            urgent: a thread or a Future waits for the reply; else the callback may be delayed by
                some milliseconds, until other replies are read.
        """

    def on_orphaned(self, callback: Callable[[Outcome[Frame]], None]) -> None:
        """Call ``callback`` with the reply, should one arrive, after an interrupt of ``call``.

        What waits for replies may not know of the call, nor its request have been sent; a callback
        of ``on_done`` may be there, too.
        """
        self.on_done(callback, urgent=False)


class PendingReply(OneShot[Outcome[Frame]], Pending):
    """A pending call that is completed by ``complete``."""

    __slots__ = ()

    def complete(self, outcome: Outcome[Frame]) -> bool:
        """End the call; return False, and change nothing, if it has ended before."""
        return self.set(outcome)

    def follow(self, pending: Pending) -> None:
        """Complete this call when another one is complete, with its outcome."""

        def complete(outcome: Outcome[Frame]) -> None:
            self.complete(outcome)

        pending.on_done(complete)

    def wait(self, timeout: float | None) -> Frame:
        return self._wait_value(timeout).unwrap()

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        self._add_callback(callback)

    def serve(self, serve: Serve, frame: Frame) -> None:
        """Complete this call with the reply of ``serve``, which is in this process."""
        reply = served(serve, frame)
        if isinstance(reply, Deferred):
            reply.on_done(lambda frame: self.complete(Value(copied(frame))))
        else:
            self.complete(Value(copied(reply)))


def served(serve: Serve, frame: Frame, may_block: bool = True) -> Frame | Deferred:
    """Return the reply of ``serve``, or an ERROR frame if ``serve`` itself raises."""
    try:
        return serve(frame, may_block)
    except BaseException as exc:
        with contextlib.suppress(BaseException):  # an error may fail to be shown
            logger.exception("a call could not be served")
        text = f"the call could not be served: {type(exc).__name__}: {text_of(exc)}"
        remote: tuple[Any, ...] = (text, pickle.dumps(CallError), "CallError", {})
        return Frame(Kind.ERROR, frame.session, -1, frame.call_id, data=pickle.dumps(remote, 5))


def copied(frame: Frame) -> Frame:
    """Return a copy that shares no memory with ``frame``, for a receiver in the same process."""
    buffers = [bytearray(flat(buffer)) for buffer in frame.buffers]
    return Frame.unpack(frame.pack(), buffers, frame.objects)


class Transport(abc.ABC):
    """Carry frames between this worker and its peers."""

    #: its name in settings and logs
    name: str

    @property
    @abc.abstractmethod
    def address(self) -> Address:
        """What peers need to reach this worker; goes into its ``Member`` record."""

    @property
    def node(self) -> str:
        """Network address of this worker's node; empty where it has none."""
        return ""

    @property
    def node_id(self) -> str:
        """Identifier of this worker's node; workers with equal ones share its memory."""
        return self.node

    @property
    def is_hosted(self) -> bool:
        """Whether this process is that of the actor which peers call."""
        return False

    @abc.abstractmethod
    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        """Serve calls from now on.

        Args:
            serve: answers a frame; it may block as long as the user's function does.
            find: returns the member with a worker id, None if there is none.
            secret: known to the members of the group only.
        """

    @abc.abstractmethod
    def call(self, peer: Member, frame: Frame) -> Pending:
        """Send a request to a peer; return where its reply will be, and set ``frame.pending``."""

    def on_interrupted_call(self) -> None:  # noqa: B027 - of most there is nothing to read
        """Read the reply to a call all the same that an interrupt keeps from being waited for.

        The interrupt may strike in ``call``, or just after it.
        """

    @abc.abstractmethod
    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        """Return where a reply will be that the peer sends by ``send_reply``.

        The request went, and the reply was announced, by another transport.  Call it once a reply.

        Args:
            call_id: of the request.
            peer: the callee.
        """

    @abc.abstractmethod
    def send_reply(self, request: Frame, reply: Frame) -> None:
        """Send the reply to a request that arrived by another transport.

        It may block while it connects to the caller.  A caller that has left the group is ignored.
        """

    @abc.abstractmethod
    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        """End the calls to a peer, and the replies expected of it, which is known to be gone."""

    def kill(self, peer: Member) -> None:  # noqa: B027 - there may be no such processes
        """End the process of a peer at once, if it is that of the actor which peers call."""

    def sent_bytes(self) -> dict[str, int]:
        """Return how many bytes were sent so far by way, such as "connection"."""
        return {}

    @abc.abstractmethod
    def flush_replies(self, timeout: float) -> None:
        """Wait until the calls that other threads serve now are replied to.

        A worker calls it before it leaves the group: peers fail their calls to one that has left.

        Args:
            timeout: in seconds.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop serving and sending, and fail the expected replies; idempotent."""


class Directory(abc.ABC):
    """The rendezvous of a group: unique names and ids, liveness, barriers."""

    @abc.abstractmethod
    def join(self, member: Member, timeout: float) -> Snapshot:
        """Join the group; wait until it is complete.

        Raises:
            GroupError: the group refuses the member, or is not complete in ``timeout`` seconds.
        """

    @abc.abstractmethod
    def follow(
        self,
        version: int,
        apply: Callable[[list[Change]], None],
        on_expelled: Callable[[str], None],
    ) -> None:
        """Follow the group's changes until ``close``.

        Args:
            version: the last one that is known.
            apply: called with every later change, in order, and with losses of members that
                nobody else reports: their version is 0.
            on_expelled: called with the reason if the group has declared this member lost.
        """

    @abc.abstractmethod
    def members(self) -> list[Member]:
        """Return the present members of the group."""

    @abc.abstractmethod
    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        """Wait until every remaining member reports at ``tag``; return the reports by name.

        Raises:
            GroupError: some member did not report in ``timeout`` seconds.
        """

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the group; the other members are notified at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop following; idempotent."""
