"""What the directory of a group answers to its members, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rayrpc._protocol.membership import Change, Member, Snapshot

__all__ = [
    "DIRECTORY_NAME",
    "Description",
    "MOST_MEMBERS",
    "Restored",
    "SharedReports",
    "SharedSnapshot",
    "WANTS_MEMBERS",
    "poll_seconds",
]

#: of the actor, before the key of its group
DIRECTORY_NAME = "rayrpc-directory:"

# An answer about more members does not hold their records itself: N of them would be N² records.
MOST_MEMBERS = 32

# The answer to a report whose members are not known.
WANTS_MEMBERS = "which members are there?"

# How often a poll is answered without changes, for each peer_timeout; and, in a large group, how
# many a second and how often at least.
POLLS = 5
POLLS_A_SECOND = 200
LEAST_POLLS = 2


def poll_seconds(peer_timeout: float, members: int) -> float:
    """Return after how long a poll is answered without changes.

    Args:
        peer_timeout: in seconds.
        members: so many poll.
    """
    seconds = max(peer_timeout / POLLS, members / POLLS_A_SECOND)
    return min(seconds, peer_timeout / LEAST_POLLS)


class Description(NamedTuple):
    """Who is in a group.

    Args:
        key (str): names the group.
        sessions (list[list[Member]]): the members of each of its sessions.
        joining (list[tuple[Member, list[int]]]): who wait for others, and for which ranks.
    """

    key: str
    sessions: Sequence[Sequence[Member]]
    joining: Sequence[tuple[Member, Sequence[int]]]


class Restored(NamedTuple):
    """The answer to a member that has reported.

    Args:
        version (int): of its session.
        changes (list[Change]): that lead there.
    """

    version: int
    changes: list[Change]


class SharedSnapshot(NamedTuple):
    """A snapshot without its members, and an ObjectRef of these.

    Args:
        snapshot (Snapshot): its ``members`` are empty.
        members (ObjectRef): of the list.
    """

    snapshot: Snapshot
    members: Any


class SharedReports(NamedTuple):
    """What a barrier returns, in Ray's object store.

    Args:
        reports (ObjectRef): of the payloads by name.
    """

    reports: Any
