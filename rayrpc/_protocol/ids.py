"""Identities of workers, RRefs and forks, in torch's format."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

__all__ = ["EPOCH_BITS", "GloballyUniqueId", "IdSource", "WorkerInfo"]

MAX_NAME_LEN = 128
# What a worker numbers starts anew, above these bits, with each member that has its id.
EPOCH_BITS = 40
_NAME = re.compile(r"[A-Za-z0-9_:-]+\Z")


class GloballyUniqueId(NamedTuple):
    """Identity of an RRef or of one fork of it.

    Args:
        created_on (int): id of the worker that created it.
        local_id (int): counter on that worker.
    """

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class IdSource:
    """Create unique identities on one worker.

    Args:
        worker_id (int): id of the worker.
        epoch (int): how often this id was used in the group before; peers may still hold
            identities that an earlier worker with this id created.
    """

    def __init__(self, worker_id: int, epoch: int = 0) -> None:
        self._worker_id = worker_id
        self._next = itertools.count(epoch << EPOCH_BITS).__next__

    def new(self) -> GloballyUniqueId:
        """Return a new identity, unique in the group."""
        return GloballyUniqueId(self._worker_id, self._next())


class WorkerInfo:
    """Name and id of a worker, as ``torch.distributed.rpc.WorkerInfo``.

    Args:
        name (str): letters, digits, ``_``, ``-`` and ``:``; shorter than 128 characters.
        id (int): the worker's rank in its group.

    Raises:
        RuntimeError: the name is empty, too long or has other characters.
    """

    __slots__ = ("id", "name")

    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Worker name must be a str, got {type(name).__name__}")
        if len(name) >= MAX_NAME_LEN or not _NAME.match(name):
            raise RuntimeError(  # torch's text
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than "
                f"{MAX_NAME_LEN} chars, but got {name}"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", id)

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"WorkerInfo is read-only: cannot set {key!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return self.id == other.id and self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)

    def _repr_html_(self) -> str:
        return (
            "<table><tr><th>id</th><th>name</th></tr>"
            f"<tr><td>{self.id}</td><td>{self.name}</td></tr></table>"
        )
