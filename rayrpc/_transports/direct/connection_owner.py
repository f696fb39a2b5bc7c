"""What a connection needs of the transport that opened it."""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending

__all__ = ["ConnectionOwner"]

C = TypeVar("C", contravariant=True)


class ConnectionOwner(Protocol[C]):
    """Opens connections of the type ``C``, and handles what they cannot do."""

    def connect(self, peer: Member, is_bulk: bool = False, pair: int = 0) -> socket.socket:
        """Return an authenticated connection; raise OSError or RpcError if there is none."""

    def reroute(self, peer: Member, frame: Frame, reason: str) -> Pending:
        """Send by another transport a request of which the connection sent no byte."""

    def expect_large(self, connection: C, call_id: int) -> Pending | Error:
        """Expect a large reply that a connection has announced; return an Error if it is lost."""

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        """Expect a reply that a connection has announced, and another transport carries."""

    def on_connection_lost(self, connection: C, reason: str) -> None:
        """Handle the end of a connection; the calls that were sent on it wait for ``fail``."""
