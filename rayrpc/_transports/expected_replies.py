"""Replies that arrive apart from their calls: matched with them in whatever order they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import PendingReply
from rayrpc.errors import WorkerDiedError

__all__ = ["ExpectedReplies"]

# An announcement and its reply come by different ways, but at about the same time.
KEEP_SECONDS = 60.0


class ExpectedReplies:
    """Match replies with the calls that expect them; thread-safe.

        expect ── on_reply ──> completed      the callee's reply was announced first
        on_reply ── expect ──> completed      the reply overtook its announcement
                 └── time ───> dropped        its announcement was lost with its connection

    Args:
        find (Callable): returns the member with a worker id, None if there is none.
        clock (Callable): returns the time in seconds.
    """

    def __init__(
        self,
        find: Callable[[int], Member | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._clock = clock
        # by call id, with the callee's token
        self._replies: dict[int, tuple[PendingReply, str]] = {}
        # by call id, in the order of their arrival: when they came, and are not expected yet
        self._early: dict[int, float] = {}
        self._lock = threading.Lock()

    def expect(self, call_id: int, peer: Member) -> PendingReply:
        """Return where the reply to a call is, or will be."""
        with self._lock:
            is_early = self._early.pop(call_id, None) is not None
            reply = self._replies.pop(call_id)[0] if is_early else PendingReply()
            if not is_early:
                self._replies[call_id] = (reply, peer.token)
        now = self._find(peer.id)
        if now is None or now.token != peer.token:  # its loss was reported before this call
            self.fail(
                WorkerDiedError(peer.name, "it left during a call", peer.node), token=peer.token
            )
        return reply

    def on_reply(self, call_id: int, frame: Frame) -> None:
        """Complete a call with its reply."""
        now = self._clock()
        with self._lock:
            for early in [i for i, when in self._early.items() if when < now - KEEP_SECONDS]:
                del self._early[early]
                del self._replies[early]
            if call_id in self._early:  # it came twice
                return
            reply, _ = self._replies.pop(call_id, (None, ""))
            if reply is None:
                reply = PendingReply()
                self._replies[call_id] = (reply, "")
                self._early[call_id] = now
        reply.complete(Value(frame))

    def fail(self, error: BaseException, token: str | None = None) -> None:
        """Fail the calls that wait for their reply.

        Args:
            error: how they end.
            token: only those to the peer with this token.
        """
        with self._lock:
            ids = [i for i, (_, of) in self._replies.items() if token is None or of == token]
            replies = [self._replies.pop(i)[0] for i in ids]
            for call_id in ids:
                self._early.pop(call_id, None)
        for reply in replies:
            reply.complete(Error(error))
