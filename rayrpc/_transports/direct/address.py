"""Where a worker accepts connections.

The directory's actor unpickles addresses, so this module needs neither torch nor Ray.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from rayrpc._protocol.membership import Member

__all__ = ["DirectAddress", "for_fallback"]


class DirectAddress(NamedTuple):
    """How peers reach a worker by connections, or by its fallback transport.

    Args:
        fallback (Any): the worker's address on the fallback transport.
        node (str): identifier of its node.
        unix (str): name of its UNIX socket, for peers on its node; empty if there is none.
        host (str): network address or name at which peers on other nodes reach it.
        port (int): TCP port for peers on other nodes; 0 if there is none.
    """

    fallback: Any
    node: str
    unix: str
    host: str
    port: int

    def find(self) -> Any:
        """Return a handle of the worker's actor endpoint, as its fallback address does.

        Raises:
            ValueError: the endpoint has ended.
        """
        return self.fallback.find()


def for_fallback(peer: Member) -> Member:
    """Return a member with its address on the fallback transport."""
    if isinstance(peer.address, DirectAddress):
        return replace(peer, address=peer.address.fallback)
    return peer
