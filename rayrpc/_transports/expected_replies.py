"""Replies that arrive apart from their calls: matched with them in whatever order they come."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import PendingReply
from rayrpc.errors import WorkerDiedError

__all__ = ["ExpectedReplies"]


class ExpectedReplies:
    """Match replies with the calls that expect them; thread-safe.

        expect ── on_reply ──> completed      the callee's reply was announced first
        on_reply ── expect ──> completed      the reply overtook its announcement

    Args:
        find (Callable): returns the member with a worker id, None if there is none.
    """

    def __init__(self, find: Callable[[int], Member | None]) -> None:
        self._find = find
        # by call id, with the callee's token; None: the reply is there, and not expected yet
        self._replies: dict[int, tuple[PendingReply, str | None]] = {}
        self._lock = threading.Lock()

    def expect(self, call_id: int, peer: Member) -> PendingReply:
        """Return where the reply to a call is, or will be."""
        reply = self._match(call_id, peer.token)
        now = self._find(peer.id)
        if now is None or now.token != peer.token:  # its loss was reported before this call
            self.fail(
                WorkerDiedError(peer.name, "it left during a call", peer.node), token=peer.token
            )
        return reply

    def on_reply(self, call_id: int, frame: Frame) -> None:
        """Complete a call with its reply."""
        self._match(call_id, None).complete(Value(frame))

    def _match(self, call_id: int, token: str | None) -> PendingReply:
        with self._lock:
            reply, _ = self._replies.pop(call_id, (None, None))
            if reply is None:
                reply = PendingReply()
                self._replies[call_id] = (reply, token)
            return reply

    def fail(self, error: BaseException, token: str | None = None) -> None:
        """Fail the calls that wait for their reply.

        Args:
            error: how they end.
            token: only those to the peer with this token.
        """
        with self._lock:
            ids = [i for i, (_, of) in self._replies.items() if token is None or of == token]
            replies = [self._replies.pop(i)[0] for i in ids]
        for reply in replies:
            reply.complete(Error(error))
