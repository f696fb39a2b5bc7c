"""Rebuild the sessions of a group from its members: the directory was restarted, and knows nothing.

    EMPTY ──report──> COLLECTING ──(all have reported, or time is up)──> BUILT ──report──> BUILT

Each member reports its session, and which version of it it has applied.  All members at one version
know the same members, so one of them tells who they are.  The highest version that was reported
counts: what the lost directory decided after it, no member knows.  Members that do not report are
members all the same, until their endpoints prove to have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import Change, Member, Session

__all__ = ["Rebuild", "Report"]


@dataclass(frozen=True)
class Report:
    """What a member knows of its session.

    Args:
        member (Member): itself.
        session (int): number of the session.
        admitted (int): the session's version that admitted it.
        version (int): the last one that it has applied.
        secret (bytes): of the group.
        epochs (dict): how often each id was used in the session, as far as it knows.
        synced (dict): what the last barriers returned, by tag.
        restarting (Sequence[Change]): deaths of members that are started again.
    """

    member: Member
    session: int
    admitted: int
    version: int
    secret: bytes = b""
    epochs: dict[int, int] = field(default_factory=dict)
    synced: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarting: Sequence[Change] = ()

    @property
    def view(self) -> tuple[int, int]:
        """What names the members that it knows."""
        return self.session, self.version


class Rebuild:
    """Collect reports, and make the group of them; pure.

    Args:
        key (str): names the group.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._reports: dict[str, Report] = {}  # by token
        self._views: dict[tuple[int, int], list[Member]] = {}
        self._group: Group | None = None

    def add(self, report: Report, members: Sequence[Member] | None = None) -> bool:
        """Take a report.

        Args:
            report: of a member.
            members: all that it knows.

        Returns:
            False if ``members`` are needed: report again with them.
        """
        if members is not None:
            self._views[report.view] = list(members)
        elif report.view not in self._views:
            return False
        self._reports[report.member.token] = report
        return True

    @property
    def secret(self) -> bytes:
        """The group's, by the members; empty if none has reported."""
        return next((each.secret for each in self._reports.values()), b"")

    @property
    def is_complete(self) -> bool:
        """Tell whether there are reports, and all members that they know have reported."""
        known = {member.token for view in self._views.values() for member in view}
        return bool(known) and known <= self._reports.keys()

    def build(self) -> Group:
        """Make the group of the reports so far."""
        reports = sorted(self._reports.values(), key=lambda each: each.version, reverse=True)
        sessions: dict[int, Session] = {}
        for report in reports:
            if report.session not in sessions:
                sessions[report.session] = self._session(report)
        self._group = Group.restored(self._key, sessions.values())
        for report in reports:
            _take_known(sessions[report.session], report)
        return self._group

    def answer(self, report: Report) -> tuple[int, list[Change]] | None:
        """Return what a member that has reported does not know.

        Args:
            report: of the member.

        Returns:
            The version of its session, and the changes that lead there; None: the member was
            declared lost before.
        """
        group = self._group
        assert group is not None
        session = group.find(report.member.token)
        if session is None:
            session = self._restore_late(group, report)
        if session is None:
            return None
        _take_known(session, report)
        return session.version, _difference(self._views[report.view], session)

    def _restore_late(self, group: Group, report: Report) -> Session | None:
        """Return the session of a member that reports after the group was made, if it has one."""
        session = group.by_number(report.session)
        if session is None:  # it is the first of its session
            session = self._session(report)
            group.add(session)
        elif report.admitted <= session.restored_version or session.has_namesake(report.member):
            return None
        else:
            session.restore(report.member)
        return session

    def _session(self, report: Report) -> Session:
        members = self._views[report.view]
        return Session.restored(report.session, members, report.version, report.restarting)


def _take_known(session: Session, report: Report) -> None:
    """Note the ids that were used, and pass the barriers again that a member has passed."""
    session.note_epochs(report.epochs)
    tokens = {member.name: member.token for member in session.members.values()}
    for tag, payloads in report.synced.items():
        for name in payloads.keys() & tokens.keys():
            session.report(tag, tokens[name], payloads[name])


def _difference(known: Iterable[Member], session: Session) -> list[Change]:
    """Return the changes from the members that are known to those of a session."""
    before = {member.token: member for member in known}
    now = session.members
    cause = "the group lost it while the directory was restarted"
    lost = {change.member.token: change for change in session.changes if change.kind != "joined"}
    changes = [
        lost.get(token, Change(session.version, "died", member, cause))
        for token, member in before.items()
        if token not in now
    ]
    changes += [
        Change(session.version, "joined", member)
        for token, member in now.items()
        if token not in before
    ]
    return [change._replace(version=session.version) for change in changes]
