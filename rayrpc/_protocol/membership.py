"""Who is in a group: a pure state machine that the group's directory runs.

A group is named by its key.  Under one key, sessions follow one another: a session is static
(``world_size`` members, complete when all have joined) or dynamic (members come and go).  A
session ends when all its members have left or died; a join that finds a static session which
lost a member opens the next one, so that a crashed run never stands in the way of the next.

Events go in (``join``, ``leave``, ``died``, ``withdraw``), decisions come out: who is admitted,
who is refused and why.  Members learn of changes by asking for events after a version.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = ["Admitted", "Change", "Decision", "Group", "Member", "Refused", "Session", "Snapshot"]

MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not supported. "
    "Static group has a `world_size` set and is a fixed size. Dynamic group has no `world_size` "
    "set and allows ranks to join and leave."
)


@dataclass(frozen=True)
class Member:
    """One worker as the group knows it.

    Args:
        token (str): unique per ``init_rpc`` call.
        name (str): the worker's name.
        id (int): its rank; -1 in a request: any free one (dynamic groups).
        world_size (int | None): what it asked for.
        address (Any): what a transport needs to reach it.
        node (str): address of its node.
        pid (int): its process.
        main (str): identity of its ``__main__``; equal ones share functions by reference.
        epoch (int): how often its id was used before in this session.
        extra (dict): more that peers may need to know (device maps, ...).
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
    """What an admitted member starts with.

    Args:
        session (int): number of the session.
        me (Member): the member, its id filled in.
        members (list[Member]): all of them.
        version (int): how many changes these include.
        secret (bytes): what members prove to one another that they know; empty if nobody asks.
    """

    session: int
    me: Member
    members: list[Member]
    version: int
    secret: bytes = b""


class Admitted(NamedTuple):
    """Decision: this join succeeded."""

    token: str
    snapshot: Snapshot


class Refused(NamedTuple):
    """Decision: this join failed."""

    token: str
    reason: str


Decision = Admitted | Refused


class Session:
    """One run of a group."""

    def __init__(self, number: int, world_size: int | None) -> None:
        self.number = number
        self.world_size = world_size
        self.pending: dict[str, Member] = {}
        self.members: dict[str, Member] = {}
        self.changes: list[Change] = []
        self.complete = world_size is None
        self.broken = False  # a static session that lost a member
        self._uses: dict[int, int] = {}
        self._barriers: dict[str, dict[str, Any]] = {}

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return len(self.changes)

    @property
    def is_over(self) -> bool:
        """Tell whether nobody is in it, or waits to be."""
        return not self.members and not self.pending

    def join(self, request: Member) -> list[Decision]:
        """Take a request to join; answer it and those that waited for it."""
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
        epoch = self._uses.get(rank, 0)
        self._uses[rank] = epoch + 1
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
        waiting = sorted(self.pending.values(), key=lambda m: m.id)
        self.pending.clear()
        seen: dict[str, Member] = {}
        for member in waiting:
            if member.name in seen:
                reason = _not_unique(member, seen[member.name])
                return [Refused(m.token, reason) for m in waiting]
            seen[member.name] = member
        self.complete = True
        self.members = {m.token: m for m in waiting}
        return [Admitted(m.token, Snapshot(self.number, m, waiting, 0)) for m in waiting]

    def _admit(self, member: Member) -> Decision:
        self.members[member.token] = member
        self.changes.append(Change(self.version + 1, "joined", member))
        members = list(self.members.values())
        return Admitted(member.token, Snapshot(self.number, member, members, self.version))

    def remove(self, token: str, kind: str, cause: str = "") -> bool:
        """Take a member out; tell whether it was in."""
        if self.pending.pop(token, None) is not None:
            return True
        member = self.members.pop(token, None)
        if member is None:
            return False
        self.changes.append(Change(self.version + 1, kind, member, cause))
        self.broken = self.world_size is not None
        return True

    def since(self, version: int) -> list[Change]:
        """Return the changes after a version."""
        return self.changes[version:]

    def missing(self) -> list[int]:
        """Return the ranks that a static session still waits for."""
        have = {m.id for m in self.pending.values()}
        return [] if self.complete else [r for r in range(self.world_size or 0) if r not in have]

    def report(self, tag: str, token: str, payload: Any) -> None:
        """Note that a member reached the barrier ``tag``."""
        self._barriers.setdefault(tag, {})[token] = payload

    def reached(self, tag: str) -> dict[str, Any] | None:
        """Return what the members reported at ``tag`` once all that are left have, else None."""
        reports = self._barriers.get(tag, {})
        if any(token not in reports for token in self.members):
            return None
        return {m.name: reports[m.token] for m in self.members.values()}

    def absent(self, tag: str) -> list[str]:
        """Return the names of the members that have not reported at ``tag``."""
        reports = self._barriers.get(tag, {})
        return sorted(m.name for m in self.members.values() if m.token not in reports)


class Group:
    """All sessions under one key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.sessions: list[Session] = []
        # what kind the group is; a directory forgets it when it ends, soon after its members
        self.was_static: bool | None = None
        self._count = 0

    def join(self, request: Member) -> tuple[Session | None, list[Decision]]:
        """Take a request to join; returns the session that it goes to, and decisions."""
        self.sessions = [s for s in self.sessions if not s.is_over]
        session = self.sessions[-1] if self.sessions else None
        if self.was_static is not None and self.was_static != (request.world_size is not None):
            return None, [Refused(request.token, MIXED)]
        if session is None or session.broken:
            session = Session(self._count, request.world_size)
            self._count += 1
            self.sessions.append(session)
            self.was_static = request.world_size is not None
        elif session.world_size is not None and session.complete:
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
        """Return the session that a member is in or waits for."""
        for session in self.sessions:
            if token in session.members or token in session.pending:
                return session
        return None

    @property
    def is_empty(self) -> bool:
        """Tell whether nobody is in any session."""
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
