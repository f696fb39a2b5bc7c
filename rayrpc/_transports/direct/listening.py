"""The address and port at which a worker listens for workers of other nodes."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Listening", "listen", "listen_at"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listening:
    """Where to listen, and the address to announce.

    Args:
        host: an address, a name or a network interface; None: the interface that TensorPipe's
            ``TP_SOCKET_IFNAME`` names, else the node's address.
        ports: as ``FIRST-LAST``; None: any free port.
        announced: an address, a name or a network interface; None: the address at which it listens.
    """

    host: str | None = None
    ports: str | None = None
    announced: str | None = None

    def open(self, worker: str, node: str) -> tuple[socket.socket | None, str]:
        """Listen; if that fails, log it: peers then use the fallback transport.

        Args:
            worker: names the worker in the message.
            node: the address of the worker's node.

        Returns:
            The listener and the address to announce; if it failed, None and the node's address.
        """
        host = address_of(self.host or os.environ.get("TP_SOCKET_IFNAME") or node)
        try:
            listener = listen(host, self.ports)
        except OSError as exc:
            logger.warning(
                "%s cannot listen at %s: %s. Workers of other nodes reach it by Ray's actor calls, "
                "which are slower. Set listen_host to an address or an interface of this node, "
                "and listen_ports to ports that are free.",
                worker,
                host,
                exc,
            )
            return None, node
        if self.announced is not None:
            return listener, address_of(self.announced)
        return listener, node if _is_any(host) else host


def listen(host: str, ports: str | None = None) -> socket.socket:
    """Return a socket that listens at an address.

    Args:
        host: an address or a name.
        ports: the first free one of ``FIRST-LAST`` is taken; None: any.

    Raises:
        OSError: the address is not this host's, or no port is free.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for port in _ports(ports):
        try:
            # an earlier worker's port may still be in TIME_WAIT
            return listen_at(family, (address[0], port, *address[2:]), reuse=ports is not None)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {ports} is free")


def listen_at(family: int, address: Any, reuse: bool = False) -> socket.socket:
    """Return a socket that listens at an address of a family, and does not block.

    Args:
        family: such as ``socket.AF_UNIX``.
        address: as ``bind`` takes it.
        reuse: listen even while connections of an earlier listener are in TIME_WAIT.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _ports(ports: str | None) -> Iterator[int]:
    if ports is None:
        yield 0
    else:
        first, _, last = ports.partition("-")
        yield from range(int(first), int(last) + 1)


def address_of(host: str) -> str:
    """Return the address of a network interface of this node; return other texts as they are."""
    import psutil

    addresses = psutil.net_if_addrs().get(host, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in addresses:
            if each.family == family and not ipaddress.ip_address(each.address).is_link_local:
                return str(each.address)
    return host


def _is_any(host: str) -> bool:
    """Tell whether a host is the address of all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
