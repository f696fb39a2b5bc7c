"""The members of a group in one session: a pure state machine.

A session is static (``world_size`` members) or dynamic (members join and leave at any time):

    static    COMPLETE ──(a member left or died)──> BROKEN
    dynamic   OPEN

It ends when it has no members.  Who is in it is decided by ``group``.  Members ask for the changes
after the version that they know.

Guests are members that only call the others, in a session of either kind.  They come and go: no
barrier waits for them, and a static session is whole without them.  There, they have ids from
``world_size`` on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from rayrpc._protocol.origin import Origin

__all__ = [
    "Address",
    "Admitted",
    "Change",
    "Decision",
    "GUEST",
    "Member",
    "PROCESS",
    "RESTARTS",
    "Refused",
    "Session",
    "SessionState",
    "Snapshot",
    "not_unique",
    "rank_taken",
]


#: what a transport needs to reach a worker; the directory passes it on
Address = Any

#: marks a member that only calls the others, in its ``extra``
GUEST = "guest"
#: in its ``extra``, the id of its process, by which functions sent by value share their globals
PROCESS = "process"
#: in its ``extra``, how often a worker is started again if it dies; -1: always
RESTARTS = "restarts"


@dataclass(frozen=True)
class Member:
    """One membership of a worker.

    Args:
        token (str): unique per ``init_rpc`` call.
        name (str): the worker's name.
        id (int): its rank; -1 in a request: any free one (dynamic groups).
        world_size (int | None): size of the group that it joins; None: dynamic.
        address (Address): what a transport needs to reach it.
        node (str): address of its node.
        pid (int): id of its process.
        main (str): identity of its ``__main__``; workers with equal ones send the functions of
            their scripts by reference.
        epoch (int): how often its id was used before in this session.
        extra (dict): further settings for peers (device maps, ...).
        origin (Origin): who started its process.
        named (bool): the group's key is a name, and not an address.
    """

    token: str
    name: str
    id: int
    world_size: int | None = None
    address: Address = None
    node: str = ""
    pid: int = 0
    main: str = ""
    epoch: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    named: bool = False

    @property
    def is_guest(self) -> bool:
        """Tell whether it only calls the others."""
        return GUEST in self.extra

    @property
    def is_restarted(self) -> bool:
        """Tell whether it is started again if it dies."""
        return bool(self.extra.get(RESTARTS))


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
        note (str): what the user may want to know; empty: nothing.
        restarting (Sequence[Change]): deaths of members that are started again.
    """

    session: int
    me: Member
    members: list[Member]
    version: int
    secret: bytes = b""
    note: str = ""
    restarting: Sequence[Change] = ()


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

    COMPLETE = "complete"
    BROKEN = "broken"
    OPEN = "open"


class Session:
    """One run of a group.

    Args:
        number (int): counts the sessions of the group.
        members (list[Member]): of a static one; none: it is dynamic.
    """

    def __init__(self, number: int, members: Sequence[Member] = ()) -> None:
        self.number = number
        self.state = SessionState.COMPLETE if members else SessionState.OPEN
        self.members = {member.token: member for member in members}
        self._guests: set[str] = set()  # their tokens
        self.changes: list[Change] = []
        #: of a session that was restored: its version then, before ``changes``
        self.restored_version = 0
        self._epochs: dict[int, int] = {}  # by id: how often it was used
        self._restarting: dict[str, Change] = {}  # deaths of members that are started again
        self._reports: dict[str, dict[str, Any]] = {}  # by barrier and token

    @classmethod
    def restored(
        cls,
        number: int,
        members: Sequence[Member],
        version: int,
        restarting: Sequence[Change] = (),
    ) -> Session:
        """Return a session as its members know it.

        Args:
            number: of the session.
            members: all of them.
            version: of the session.
            restarting: deaths of members that are started again.
        """
        session = cls(number)
        session.restored_version = version
        session._restarting = {change.member.name: change for change in restarting}
        for member in members:
            session._put(member)
        workers = session.workers
        size = next((member.world_size for member in workers), None)
        if size is not None:
            is_whole = len(workers) == size
            session.state = SessionState.COMPLETE if is_whole else SessionState.BROKEN
        return session

    def restore(self, member: Member) -> None:
        """Take back a member that only it itself knows of."""
        self._admit(member)

    def has_namesake(self, member: Member) -> bool:
        """Tell whether another member has the name or the id of this one."""
        return any(m.name == member.name or m.id == member.id for m in self.members.values())

    def _put(self, member: Member) -> None:
        self.members[member.token] = member
        if member.is_guest:
            self._guests.add(member.token)
        self._restarting.pop(member.name, None)
        self.note_epochs({member.id: member.epoch + 1})

    def note_epochs(self, epochs: dict[int, int]) -> None:
        """Note how often ids were used, at least."""
        for rank, count in epochs.items():
            self._epochs[rank] = max(self._epochs.get(rank, 0), count)

    @property
    def is_static(self) -> bool:
        """Tell whether it was formed with a ``world_size``."""
        return self.state is not SessionState.OPEN

    @property
    def workers(self) -> Collection[Member]:
        """The members that are no guests."""
        if not self._guests:
            return self.members.values()
        return [member for token, member in self.members.items() if token not in self._guests]

    @property
    def deciding(self) -> Collection[Member]:
        """The members by which joins find the session: workers; of an open one else its guests."""
        return self.workers or (() if self.is_static else self.members.values())

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return self.restored_version + len(self.changes)

    @property
    def is_over(self) -> bool:
        """Tell whether the session has no members."""
        return not self.members

    def join(self, request: Member) -> Decision:
        """Decide on a join to a dynamic session, or of a guest to any."""
        ids = {m.id: m for m in self.members.values()}
        for other in self.members.values():
            if other.name == request.name:
                return Refused(request.token, not_unique(request, other))
        rank = request.id
        if rank < 0:
            before = self._restarting.get(request.name)
            first = () if before is None else (before.member.id,)
            ranks = self._ids_of_ranks()
            rank = next(i for i in (*first, *range(ranks, ranks + len(ids) + 1)) if i not in ids)
        elif rank in ids:
            return Refused(request.token, rank_taken(request, ids[rank]))
        return self._admit(replace(request, id=rank, epoch=self._epochs.get(rank, 0)))

    def _ids_of_ranks(self) -> int:
        """Return how many ids are left for ranks, whether these are members or not."""
        return max((member.world_size or 0 for member in self.members.values()), default=0)

    def _admit(self, member: Member) -> Decision:
        self._put(member)
        self.changes.append(Change(self.version + 1, "joined", member))
        return Admitted(member.token, self.snapshot(member))

    def snapshot(self, me: Member) -> Snapshot:
        """Return the state, for a member that is admitted."""
        members, restarting = list(self.members.values()), list(self._restarting.values())
        return Snapshot(self.number, me, members, self.version, restarting=restarting)

    def remove(self, token: str, kind: str, cause: str = "") -> bool:
        """Remove a member.

        Args:
            token: of the membership.
            kind: "left" or "died".
            cause: of a death.

        Returns:
            False if it was not in the session.
        """
        member = self.members.pop(token, None)
        if member is None:
            return False
        change = Change(self.version + 1, kind, member, cause)
        self.changes.append(change)
        if kind == "died" and member.is_restarted:
            self._restarting[member.name] = change
        if member.is_guest:
            self._guests.discard(token)
        elif self.is_static:
            self.state = SessionState.BROKEN
        return True

    def since(self, version: int) -> list[Change]:
        """Return the changes after a version, which is not before the restored one."""
        return self.changes[version - self.restored_version :]

    def report(self, tag: str, token: str, payload: Any) -> None:
        """Record that a member reached the barrier ``tag``, with a payload for the others."""
        self._reports.setdefault(tag, {})[token] = payload

    def reached(self, tag: str) -> dict[str, Any] | None:
        """Return the payloads at barrier ``tag`` by name; None until all workers reached it."""
        reports = self._reports.get(tag, {})
        if len(reports) < len(self.members) - len(self._guests):
            return None
        workers = self.workers
        if any(member.token not in reports for member in workers):
            return None
        return {m.name: reports[m.token] for m in workers}

    def absent(self, tag: str) -> list[str]:
        """Return the names of the workers that have not reached the barrier ``tag``."""
        reports = self._reports.get(tag, {})
        return sorted(m.name for m in self.workers if m.token not in reports)


def not_unique(one: Member, other: Member) -> str:
    """Return why a name is refused."""
    return (
        f"RPC worker name {one.name} is not unique. Workers {other.id} and {one.id} have the "
        f"same name; the first is of {other.origin}. Give every worker of the group a name of its "
        "own."
    )


def rank_taken(one: Member, other: Member) -> str:
    """Return why a rank is refused."""
    return (
        f"RPC worker {one.name!r} asks for rank {one.id}, which worker {other.name!r} (pid "
        f"{other.pid} on {other.node or 'this node'}) has. It is of {other.origin}. Give every "
        "worker a rank of its own, and other programs another MASTER_PORT or init_method."
    )
