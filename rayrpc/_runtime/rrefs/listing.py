"""Reports of a worker's RRefs: lists of them, and leaks."""

from __future__ import annotations

from typing import NamedTuple

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.rref_table import RRefTable
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.rrefs.creation_site import made_text

__all__ = ["OwnedRRef", "UsedRRef", "leaks", "listed"]


class OwnedRRef(NamedTuple):
    """An RRef that a worker owns, and that some worker holds.

    Args:
        id (tuple[int, int]): of the RRef.
        type (str): of the value; empty: it is not there yet.
        made (str): where it was made; empty: not known.
        holders (list[int | None]): ids of the workers that hold its forks, by fork; None: of one
            that is not known.
    """

    id: tuple[int, int]
    type: str
    made: str
    holders: list[int | None]


class UsedRRef(NamedTuple):
    """A fork of another worker's RRef.

    Args:
        id (tuple[int, int]): of the RRef.
        owner (int): id of the worker that has the value.
        made (str): where it was made, if by this worker; empty: another one has sent it.
    """

    id: tuple[int, int]
    owner: int
    made: str


def listed(table: RRefTable) -> tuple[list[OwnedRRef], list[UsedRRef]]:
    """Return the RRefs that a worker owns, and those that it uses."""
    owned = [
        OwnedRRef(
            _pair(rref_id),
            _type_of(entry.cell),
            made_text(entry.cell.made),
            list(entry.forks.values()),
        )
        for rref_id, entry in table.owned.items()
    ]
    used = [
        UsedRRef(_pair(entry.rref_id), entry.owner, made_text(entry.made))
        for entry in table.used.values()
    ]
    return owned, used


def leaks(table: RRefTable) -> dict[GloballyUniqueId, str]:
    """Return torch's texts about the RRefs that are alive, with where they were made."""
    owned = {
        rref_id: f"Leaking RRef {rref_id} with {len(entry.forks)} forks{_suffix(entry.cell.made)}"
        for rref_id, entry in table.owned.items()
    }
    used = {
        fork_id: f"Leaking RRef {entry.rref_id} with fork Id {fork_id}{_suffix(entry.made)}"
        for fork_id, entry in table.used.items()
    }
    return owned | used


def _suffix(made: object) -> str:
    text = made_text(made)
    return f", made {text}" if text else ""


def _pair(rref_id: GloballyUniqueId) -> tuple[int, int]:
    return rref_id.created_on, rref_id.local_id


def _type_of(cell: Cell) -> str:
    outcome = cell.value
    if outcome is None:
        return ""
    if isinstance(outcome, Error):
        return f"{type(outcome.error).__name__} (raised)"
    kind = type(outcome.value)
    return (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__", "torch")
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
