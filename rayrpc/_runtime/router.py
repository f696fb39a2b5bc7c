"""Where the frames of a worker go: to a peer's transport, to this worker itself, or nowhere."""

from __future__ import annotations

from collections.abc import Callable

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending, PendingReply, Serve, Transport, copied
from rayrpc._runtime.members import Members

__all__ = ["Router"]


class Router:
    """Send the frames of one worker.

    Args:
        members (Members): of its group.
        transport (Transport): carries frames to its peers.
        submit (Callable): runs a task in another thread.
    """

    def __init__(
        self,
        members: Members,
        transport: Transport,
        submit: Callable[[Callable[[], None]], object],
    ) -> None:
        self._members = members
        self._transport = transport
        self._submit = submit
        self._serve: Serve

    def start(self, serve: Serve) -> None:
        """Have ``serve`` answer the frames to this worker itself; before the first ``send``."""
        self._serve = serve

    def send(self, peer: Member, frame: Frame) -> Pending:
        """Send a frame and expect its reply; that of a peer that is gone is the error why."""
        if peer.token == self._members.me.token:
            return self._send_to_self(frame)
        error = self._members.death_of(peer)
        if error is not None:
            frame.pending = pending = PendingReply()
            pending.complete(Error(error))
            return pending
        return self._transport.call(peer, frame)

    def _send_to_self(self, frame: Frame) -> Pending:
        frame.pending = pending = PendingReply()
        arrived = copied(frame)

        def serve() -> None:
            frame.begin_to_send()
            pending.serve(self._serve, arrived)

        self._submit(serve)
        return pending
