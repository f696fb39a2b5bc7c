"""What a member knows of its group: from it a directory that was restarted rebuilds the group."""

from __future__ import annotations

from typing import Any

from rayrpc._protocol.membership import Change, Member, Snapshot
from rayrpc._protocol.rebuild import Report

__all__ = ["GroupRecord"]

# How many barriers' results a member keeps for a directory that is restarted.
KEPT_SYNCS = 8


class GroupRecord:
    """Record who is in a member's group, and what its barriers have returned."""

    def __init__(self) -> None:
        #: the members, by token
        self.members: dict[str, Member] = {}
        #: the last one that was applied
        self.version = 0
        self._snapshot: Snapshot | None = None  # of the join
        self._epochs: dict[int, int] = {}  # how often each id was used
        self._restarting: dict[str, Change] = {}  # deaths of members that are started again
        self._synced: dict[str, dict[str, Any]] = {}  # what barriers returned, the last ones

    def begin(self, snapshot: Snapshot) -> None:
        """Begin with the snapshot that answers the join."""
        self._snapshot = snapshot
        self.version = snapshot.version
        joined = (Change(0, "joined", each) for each in snapshot.members)
        self.add([*snapshot.restarting, *joined])

    def add(self, changes: list[Change]) -> None:
        """Note who is a member, who is started again, and which ids were used."""
        for change in changes:
            member = change.member
            if change.kind == "joined":
                self.members[member.token] = member
                self._restarting.pop(member.name, None)
                used = self._epochs.get(member.id, 0)
                self._epochs[member.id] = max(used, member.epoch + 1)
            else:
                self.members.pop(member.token, None)
                if change.kind == "died" and member.is_restarted:
                    self._restarting[member.name] = change

    def add_sync(self, tag: str, reports: dict[str, Any]) -> None:
        """Keep what a barrier has returned."""
        kept = list(self._synced.items())[1 - KEPT_SYNCS :]
        self._synced = dict([*kept, (tag, reports)])

    def report(self) -> Report:
        """Return what a directory that was restarted needs of this worker."""
        snapshot = self._snapshot
        assert snapshot is not None
        return Report(
            snapshot.me,
            snapshot.session,
            snapshot.version,
            self.version,
            snapshot.secret,
            self._epochs,
            dict(self._synced),
            list(self._restarting.values()),
        )
