"""Parse an ``init_method``: the key of a group, and a rank if it has one.

No port is bound and no address contacted: the key only names the group in the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, urlparse

__all__ = ["Place", "find_place"]

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


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
        rank = int(query["rank"])
    if world_size is None and "world_size" in query and int(query["world_size"]) > 0:
        world_size = int(query["world_size"])

    if scheme == "env":
        key, rank = _from_environment(rank, environ, group)
    elif scheme == "tcp":
        if not url.port:
            raise _error("tcp:// rendezvous: port number missing")
        key = _address(url.hostname or "", url.port)
    elif scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise _error("file:// rendezvous: path missing")
        key = f"file:{path}"
    elif scheme == "ray":
        key = url.netloc + url.path
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
        rank = int(need("RANK"))
    address = need("MASTER_ADDR")
    return _address(address, int(need("MASTER_PORT"))), rank


def _address(host: str, port: int) -> str:
    return f"{'localhost' if host in _LOOPBACK else host}:{port}"
