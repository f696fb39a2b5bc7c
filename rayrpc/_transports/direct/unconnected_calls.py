"""Calls that no connection carries: the fallback transport carries them, or they fail."""

from __future__ import annotations

import time
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending, PendingReply, Serve, Transport
from rayrpc._transports.direct.address import for_fallback
from rayrpc._transports.direct.peer_process import has_ended
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["UnconnectedCalls", "cut_error"]

# How long a call whose connection broke waits until the directory reports that the peer died.
LOSS_SECONDS = 1.0


class UnconnectedCalls:
    """Call peers by the fallback transport, or fail the calls.

    Args:
        transport (Transport): the fallback transport.
        threads (ThreadCache): waits for the loss of peers.
        only (bool): calls fail where a connection is impossible.
    """

    def __init__(self, transport: Transport, threads: ThreadCache, only: bool) -> None:
        self._transport = transport
        self._threads = threads
        self._only = only
        self._find: Callable[[int], Member | None] = lambda _: None

    @property
    def handling(self) -> str:
        """How these calls are handled, for log messages."""
        return "fail" if self._only else f"go by the {self._transport.name} transport"

    def start(self, serve: Serve, find: Callable[[int], Member | None], secret: bytes) -> None:
        """Start the transport; see ``Transport.start``."""
        self._find = find
        self._transport.start(serve, self._find_peer, secret)

    def _find_peer(self, worker_id: int) -> Member | None:
        member = self._find(worker_id)
        return None if member is None else for_fallback(member)

    def call(self, peer: Member, frame: Frame, reason: str) -> Pending:
        """Call a peer.

        Args:
            peer: the callee, with its address on the fallback transport.
            frame: the request.
            reason: why no connection carries it.
        """
        if not self._only or frame.objects is not None:
            return self._transport.call(peer, frame)
        frame.pending = pending = PendingReply()
        self._threads.submit(lambda: self._refuse(peer, pending, reason))
        return pending

    def _refuse(self, peer: Member, pending: PendingReply, reason: str) -> None:
        error: CallError = CallError(
            f"RPC worker {peer.name!r} on node {peer.node} cannot be called directly: {reason}. "
            "The setting transport is direct; with auto, such calls go by the "
            f"{self._transport.name} transport."
        )
        if self._wait_loss(peer):
            error = WorkerDiedError(peer.name, reason, peer.node)
        pending.complete(Error(error))

    def wait_error(self, peer: Member, pid: int | None, reason: str) -> CallError:
        """Wait for a report of a peer's loss; return the error of calls whose connection broke.

        Args:
            peer: the callee.
            pid: the id of the callee's process; None: it is not known on this node.
            reason: why the connection broke.
        """
        if not self._wait_loss(peer, pid):
            return cut_error(peer, reason)
        time.sleep(LOSS_SECONDS)  # ``on_peer_lost`` follows, with the cause
        return WorkerDiedError(peer.name, reason, peer.node)

    def _wait_loss(self, peer: Member, pid: int | None = None) -> bool:
        """Wait for the loss of a peer; return False if it is not known after a while.

        Args:
            peer: the peer, whose loss the directory reports.
            pid: the id of the peer's process, whose end is a loss, too; None: it is not known.
        """
        deadline = Deadline(LOSS_SECONDS)
        while not deadline.expired:
            now = self._find(peer.id)
            if now is None or now.token != peer.token or (pid and has_ended(pid)):
                return True
            time.sleep(0.01)
        return False


def cut_error(peer: Member, reason: str) -> CallLostError:
    """Return the error of a call whose connection broke."""
    return CallLostError(
        f"The connection to RPC worker {peer.name!r} on node {peer.node} was cut during a "
        f"call: whether the function ran is not known ({reason}). Call again if it may run "
        "twice."
    )
