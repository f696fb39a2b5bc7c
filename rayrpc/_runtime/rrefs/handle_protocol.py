"""What the runtime needs of an RRef's handle, and a handle of the context of its worker."""

from __future__ import annotations

from typing import Any, Protocol

from torch.futures import Future

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Fork
from rayrpc._runtime.rrefs.cell import Cell

__all__ = ["Forks", "Handle", "MakeHandle"]


class Forks(Protocol):
    """Forks RRefs for other workers; ``RRefContext`` is one."""

    #: the group's key
    group: str

    def share_used(
        self, fork_id: GloballyUniqueId, to: int | None, into: list[Fork] | None
    ) -> Fork:
        """Fork an RRef that this worker uses."""

    def share_owned(
        self, rref_id: GloballyUniqueId, cell: Cell, to: int | None, into: list[Fork] | None
    ) -> Fork:
        """Fork an RRef that this worker owns."""

    def is_counted(self, fork_id: GloballyUniqueId, by: int | None) -> bool:
        """Tell whether a worker owns the RRef of a fork, and counts it."""


class Handle(Protocol):
    """What the runtime needs of an RRef's handle; private, because users hold handles."""

    def _share(self, rrefs: Forks, to: int | None, into: list[Fork] | None = None) -> Fork:
        """Fork the RRef for a worker."""

    def _lend(self, rrefs: Forks, to: int | None) -> GloballyUniqueId | None:
        """Return the RRef's identity if it may be lent to a worker, else None."""

    def _begin_creation(self) -> Cell:
        """Return the cell that takes the outcome of the call that creates the value."""

    def _get_future(self) -> Future[Any]:
        """Return the Future of that call."""

    def _set_future(self, future: Future[Any]) -> None:
        """Replace that Future."""


class MakeHandle(Protocol):
    """Makes handles of RRefs."""

    def __call__(
        self,
        rref_id: GloballyUniqueId,
        fork_id: GloballyUniqueId | None,
        owner: int,
        cell: Cell | None,
    ) -> Handle:
        """Return a handle.

        Args:
            rref_id: of the RRef.
            fork_id: of this worker's fork; None on the owner.
            owner: id of the owner.
            cell: holds the value; None on users.
        """
