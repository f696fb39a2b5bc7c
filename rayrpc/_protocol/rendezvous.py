"""Parse an ``init_method``: the key of a group, and a rank if it has one.

No port is bound and no address contacted: the key only names the group in the directory.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, urlparse

from rayrpc._protocol.origin import Origin

__all__ = ["Place", "find_place", "is_name", "key_of", "owned_key"]

MAX_PORT = 65535
_LOOPBACK = "localhost"


class Place(NamedTuple):
    """The place of a worker in a group.

    Args:
        key (str): names the group.
        rank (int): -1: any free one.
        world_size (int | None): None: a dynamic group.
    """

    key: str
    rank: int
    world_size: int | None


def _error(message: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {message}")


def find_place(
    init_method: str,
    rank: int,
    world_size: int | None,
    environ: Mapping[str, str],
    group: str | None,
) -> Place:
    """Return the place that the arguments of ``init_rpc`` name.

    Args:
        init_method (str): ``env://``, ``tcp://host:port``, ``file:///path`` or ``ray://name``,
            and ``?rank=R&world_size=W`` for arguments that are not given.
        rank (int): -1 if not given.
        world_size (int | None): None for a dynamic group.
        environ (Mapping): environment variables, for ``env://``.
        group (str | None): the key for ``env://`` without MASTER_ADDR.

    Raises:
        ValueError: a part is missing or the rank is out of range; torch's text where torch has one.
        RuntimeError: the scheme is unknown.
    """
    url = urlparse(init_method)
    scheme = url.scheme
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    if rank < 0 and "rank" in query:
        rank = _integer("rank", query["rank"], init_method)
    if world_size is None and "world_size" in query:
        size = _integer("world_size", query["world_size"], init_method)
        world_size = size if size > 0 else None

    if scheme == "env":
        key, rank = _from_environment(rank, environ, group)
    elif scheme == "tcp":
        try:
            port = url.port
        except ValueError as exc:
            raise _error(f"tcp:// rendezvous: the port of {init_method!r}: {exc}") from None
        if not port:
            raise _error("tcp:// rendezvous: port number missing")
        key = _address(url.hostname or "", port)
    elif scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise _error("file:// rendezvous: path missing")
        key = f"file:{path}"
    elif scheme == "ray":
        key = key_of(url.netloc + url.path)
        if not key:
            raise _error("ray:// rendezvous: name of the group missing")
    else:
        raise RuntimeError(f"No rendezvous handler for {scheme}://")

    if rank < 0 and scheme in ("tcp", "file"):
        raise _error(f"{scheme}:// rendezvous: rank parameter missing")
    if rank < 0 and world_size is not None:
        raise ValueError(f"world_size {world_size} is given without a rank; give every worker one")
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in the range of world_size {world_size}")
    return Place(key, rank, world_size)


def _from_environment(rank: int, environ: Mapping[str, str], group: str | None) -> tuple[str, int]:
    def need(name: str) -> str:
        value = environ.get(name)
        if not value:
            raise _error(f"env:// rendezvous: environment variable {name} expected, but not set")
        return value

    if group is not None and not environ.get("MASTER_ADDR"):
        return group, rank
    if rank < 0:
        rank = _integer("RANK", need("RANK"), "the environment")
    address = need("MASTER_ADDR")
    port = _integer("MASTER_PORT", need("MASTER_PORT"), "the environment")
    if not 0 <= port <= MAX_PORT:
        raise ValueError(
            f"MASTER_PORT: port must have value from 0 to {MAX_PORT} but was {port}; it names the "
            "group, and all of its workers need the same"
        )
    return _address(address, port), rank


def _integer(name: str, text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} in {where} must be an integer, got {text!r}") from None


def _address(host: str, port: int) -> str:
    return f"{_LOOPBACK if _is_loopback(host) else host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == _LOOPBACK
    # a connection to 0.0.0.0 stays on its host
    return address.is_loopback or address.is_unspecified


def key_of(group: str) -> str:
    """Return the key of a group that is given by its name, or by the address that forms it."""
    if is_name(group):
        return group
    host, _, port = group.rpartition(":")
    return _address(host, int(port))


def is_name(key: str) -> bool:
    """Tell whether a key is a name that a user chose, and neither an address nor a file."""
    return not key.startswith("file:") and re.search(r":\d+$", key) is None


def owned_key(key: str, origin: Origin) -> str:
    """Return the key of a group among those of all users of a cluster.

    Args:
        key (str): of a ``Place``.
        origin (Origin): of the member; its user owns the group.

    Returns:
        With the user, and for a loopback address the host of the origin: other users and other
        hosts have groups of their own.
    """
    if key.startswith(f"{_LOOPBACK}:"):
        return f"{origin.user}/{origin.host}-{origin.loopback}/{key}"
    return f"{origin.user}/{key}"
