"""The members of a group: a pure state machine that the group's directory runs.

A group is named by its key.  Under one key, sessions follow one another.  A session is static
(``world_size`` members) or dynamic (members join and leave at any time):

    static    FORMING ──(all ranks joined)──> COMPLETE ──(a member left or died)──> BROKEN
    dynamic   OPEN

A session ends when it has no members and no pending joins.  What a join finds decides on it:

    no session, or a BROKEN one    a new session starts; the members of the BROKEN one go on in it,
                                   so that a crashed run does not block the next one
    FORMING                        it is pending until all ranks have joined
    OPEN                           it is admitted at once
    COMPLETE                       it is refused

A join is also refused if its name or rank is taken, or if it asks for another kind of group or
another ``world_size``.

Events go in (``join``, ``remove``, ``report``), decisions come out: ``Admitted`` or ``Refused``,
and why.  Members ask for the changes after the version that they know.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

__all__ = [
    "Admitted",
    "Change",
    "Decision",
    "Group",
    "Member",
    "Refused",
    "Session",
    "SessionState",
    "Snapshot",
]

MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not supported. "
    "Static group has a `world_size` set and is a fixed size. Dynamic group has no `world_size` "
    "set and allows ranks to join and leave."
)


@dataclass(frozen=True)
class Member:
    """One membership of a worker.

    Args:
        token (str): unique per ``init_rpc`` call.
        name (str): the worker's name.
        id (int): its rank; -1 in a request: any free one (dynamic groups).
        world_size (int | None): size of the group that it joins; None: dynamic.
        address (Any): what a transport needs to reach it.
        node (str): address of its node.
        pid (int): id of its process.
        main (str): identity of its ``__main__``; workers with equal ones send the functions of
            their scripts by reference.
        epoch (int): how often its id was used before in this session.
        extra (dict): further settings for peers (device maps, ...).
    """

    token: str
    name: str
    id: int
    world_size: int | None = None
    address: Any = None
    node: str = ""
    pid: int = 0
    main: str = ""
    epoch: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Change(NamedTuple):
    """One change of a session's membership."""

    version: int
    kind: str  # "joined", "left" or "died"
    member: Member
    cause: str = ""


class Snapshot(NamedTuple):
    """The state of a session when a member is admitted.

    Args:
        session (int): number of the session.
        me (Member): the admitted member, its id filled in.
        members (list[Member]): all members.
        version (int): how many changes ``members`` includes.
        secret (bytes): by which members authenticate one another; empty if they need not.
    """

    session: int
    me: Member
    members: list[Member]
    version: int
    secret: bytes = b""


class Admitted(NamedTuple):
    """Decision: a join succeeded."""

    token: str
    snapshot: Snapshot


class Refused(NamedTuple):
    """Decision: a join failed."""

    token: str
    reason: str


Decision = Admitted | Refused


class SessionState(Enum):
    """The state of a session; see the drawing above."""

    FORMING = "forming"
    COMPLETE = "complete"
    BROKEN = "broken"
    OPEN = "open"


class Session:
    """One run of a group.

    Args:
        number (int): counts the sessions of the group.
        world_size (int | None): None: dynamic.
    """

    def __init__(self, number: int, world_size: int | None) -> None:
        self.number = number
        self.world_size = world_size
        self.state = SessionState.OPEN if world_size is None else SessionState.FORMING
        self.pending: dict[str, Member] = {}  # by token
        self.members: dict[str, Member] = {}  # by token
        self.changes: list[Change] = []
        self._epochs: dict[int, int] = {}  # by id: how often it was used
        self._reports: dict[str, dict[str, Any]] = {}  # by barrier and token

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return len(self.changes)

    @property
    def is_over(self) -> bool:
        """Tell whether the session has no members and no pending joins."""
        return not self.members and not self.pending

    def join(self, request: Member) -> list[Decision]:
        """Decide on a join, and on the pending joins that it completes."""
        if (request.world_size is None) != (self.world_size is None):
            return [Refused(request.token, MIXED)]
        if self.world_size is None:
            return [self._join_dynamic(request)]
        return self._join_static(request)

    def _join_dynamic(self, request: Member) -> Decision:
        ids = {m.id: m for m in self.members.values()}
        for other in self.members.values():
            if other.name == request.name:
                return Refused(request.token, _not_unique(request, other))
        rank = request.id
        if rank < 0:
            rank = next(i for i in range(len(ids) + 1) if i not in ids)
        elif rank in ids:
            return Refused(request.token, _rank_taken(request, ids[rank]))
        epoch = self._epochs.get(rank, 0)
        self._epochs[rank] = epoch + 1
        return self._admit(replace(request, id=rank, epoch=epoch))

    def _join_static(self, request: Member) -> list[Decision]:
        if request.world_size != self.world_size:
            return [
                Refused(
                    request.token,
                    f"RPC worker {request.name!r} (rank {request.id}) asks for world_size "
                    f"{request.world_size}, but the group is being formed with world_size "
                    f"{self.world_size}. Give every worker the same world_size.",
                )
            ]
        for other in self.pending.values():
            if other.id == request.id:
                return [Refused(request.token, _rank_taken(request, other))]
        self.pending[request.token] = request
        if len(self.pending) < (self.world_size or 0):
            return []
        members = sorted(self.pending.values(), key=lambda m: m.id)
        self.pending.clear()
        by_name: dict[str, Member] = {}
        for member in members:
            if member.name in by_name:
                reason = _not_unique(member, by_name[member.name])
                return [Refused(m.token, reason) for m in members]
            by_name[member.name] = member
        self.state = SessionState.COMPLETE
        self.members = {m.token: m for m in members}
        return [Admitted(m.token, Snapshot(self.number, m, members, 0)) for m in members]

    def _admit(self, member: Member) -> Decision:
        self.members[member.token] = member
        self.changes.append(Change(self.version + 1, "joined", member))
        members = list(self.members.values())
        return Admitted(member.token, Snapshot(self.number, member, members, self.version))

    def remove(self, token: str, kind: str, cause: str = "") -> bool:
        """Remove a member or a pending join.

        Args:
            token: of the membership.
            kind: "left" or "died".
            cause: of a death.

        Returns:
            False if it was not in the session.
        """
        if self.pending.pop(token, None) is not None:
            return True
        member = self.members.pop(token, None)
        if member is None:
            return False
        self.changes.append(Change(self.version + 1, kind, member, cause))
        if self.world_size is not None:
            self.state = SessionState.BROKEN
        return True

    def since(self, version: int) -> list[Change]:
        """Return the changes after a version."""
        return self.changes[version:]

    def missing(self) -> list[int]:
        """Return the ranks that have not joined a FORMING session."""
        if self.state is not SessionState.FORMING:
            return []
        joined = {m.id for m in self.pending.values()}
        return [rank for rank in range(self.world_size or 0) if rank not in joined]

    def report(self, tag: str, token: str, payload: Any) -> None:
        """Record that a member reached the barrier ``tag``, with a payload for the others."""
        self._reports.setdefault(tag, {})[token] = payload

    def reached(self, tag: str) -> dict[str, Any] | None:
        """Return the payloads at barrier ``tag`` by name; None until all members reached it."""
        reports = self._reports.get(tag, {})
        if any(token not in reports for token in self.members):
            return None
        return {m.name: reports[m.token] for m in self.members.values()}

    def absent(self, tag: str) -> list[str]:
        """Return the names of the members that have not reached the barrier ``tag``."""
        reports = self._reports.get(tag, {})
        return sorted(m.name for m in self.members.values() if m.token not in reports)


class Group:
    """All sessions under one key.

    Args:
        key (str): names the group.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.sessions: list[Session] = []
        # None before the first join; kept from session to session, as long as the directory runs
        self.was_static: bool | None = None
        self._count = 0  # sessions so far

    def join(self, request: Member) -> tuple[Session | None, list[Decision]]:
        """Decide on a join.

        Returns:
            The session that it joins, None if it is refused before; and the decisions on this and
            on pending joins.
        """
        self.sessions = [s for s in self.sessions if not s.is_over]
        session = self.sessions[-1] if self.sessions else None
        if self.was_static is not None and self.was_static != (request.world_size is not None):
            return None, [Refused(request.token, MIXED)]
        if session is None or session.state is SessionState.BROKEN:
            session = Session(self._count, request.world_size)
            self._count += 1
            self.sessions.append(session)
            self.was_static = request.world_size is not None
        elif session.state is SessionState.COMPLETE:
            if request.world_size is None:
                return None, [Refused(request.token, MIXED)]
            names = ", ".join(sorted(m.name for m in session.members.values()))
            return None, [
                Refused(
                    request.token,
                    f"RPC group {self.key!r} is complete: its {session.world_size} workers "
                    f"({names}) are alive. Wait until that run has ended, or use another "
                    "MASTER_PORT or init_method.",
                )
            ]
        return session, session.join(request)

    def find(self, token: str) -> Session | None:
        """Return the session with this member or pending join."""
        for session in self.sessions:
            if token in session.members or token in session.pending:
                return session
        return None

    @property
    def is_empty(self) -> bool:
        """Tell whether all sessions have ended."""
        return all(s.is_over for s in self.sessions)


def _not_unique(one: Member, other: Member) -> str:
    return (
        f"RPC worker name {one.name} is not unique. Workers {other.id} and {one.id} have the "
        "same name. Give every worker of the group a name of its own."
    )


def _rank_taken(one: Member, other: Member) -> str:
    return (
        f"RPC worker {one.name!r} asks for rank {one.id}, which worker {other.name!r} (pid "
        f"{other.pid} on {other.node or 'this node'}) has. Give every worker a rank of its own."
    )
