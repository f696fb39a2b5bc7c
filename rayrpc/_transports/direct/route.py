"""How calls reach a peer: by a connection, or by the fallback transport."""

from __future__ import annotations

from dataclasses import dataclass

from rayrpc._protocol.membership import Member
from rayrpc._transports.direct.connection import CallerConnection

__all__ = ["Route"]


@dataclass(slots=True)
class Route:
    """How calls reach a peer.

        DIRECT ── the connection breaks ──> FALLBACK     while it is made again
        DIRECT <── the peer is reached ──── FALLBACK
                                            FALLBACK     from the start: it accepts no connections

    Args:
        peer (Member): the peer, with its address on the fallback transport.
        connection (CallerConnection | None): in the state FALLBACK, broken or None.
        is_near (bool): the peer is on this node, and reached by a UNIX socket.
        reason (str): why the state is FALLBACK; empty in the state DIRECT.
    """

    peer: Member
    connection: CallerConnection | None
    is_near: bool
    reason: str = ""
