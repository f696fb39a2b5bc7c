"""What a worker knows of its RRefs, and the effects of what it learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rayrpc._protocol.ids import GloballyUniqueId

__all__ = ["Confirmed", "Effect", "Owned", "Released", "Used", "UserState"]


class UserState(Enum):
    """State of a user's fork; see the drawing in ``rref_table.py``."""

    PENDING = "pending"
    CONFIRMED = "confirmed"


class Confirmed(NamedTuple):
    """Effect: the owner counts this fork, or is lost; waiters may go on."""

    fork_id: GloballyUniqueId


class Released(NamedTuple):
    """Effect: no other worker holds this RRef, which this worker owns; its cell may be freed."""

    rref_id: GloballyUniqueId
    cell: Any


Effect = Confirmed | Released


@dataclass(slots=True)
class Owned:
    """An RRef that this worker owns."""

    cell: Any
    forks: dict[GloballyUniqueId, int | None]  # fork -> worker that holds it
    awaits_creation: bool = False  # the remote call that creates it has not arrived


@dataclass(slots=True)
class Used:
    """A fork of another worker's RRef that this worker holds."""

    rref_id: GloballyUniqueId
    owner: int
    parent: int | None
    state: UserState = UserState.PENDING
    held: bool = True  # a handle is alive in this process
    children: set[GloballyUniqueId] = field(default_factory=set)
    made: object = None  # where, if in this process
