"""Who is in a group with whom: a pure state machine that the directory of a key runs.

Under one key, sessions follow one another, and sessions of different runs are side by side.  What
a join finds decides on it:

    to a dynamic group    admitted to the OPEN session that it meets, else to a new one
    to a static group     pending until all ranks that it meets have joined; refused if a session
                          that it belongs to is COMPLETE; a BROKEN one is ignored, and its members
                          go on in it, so that a crashed run does not block the next one

Joins of one run always meet.  Joins of two runs meet as follows:

    by hand, with by hand       yes: they have the key alone in common
    a run that suffices         never: its starter has started ``world_size`` ranks or more
    any other rank of a run     if no more joins come for a while (``combine``): its program may
                                still be starting the missing ranks
    a rank that starts ranks    the same, after longer, if with them it suffices
    dynamic                     by hand, or by a name; never by an address in a started process
    a guest                     joins the session that has workers: of its run, else by hand or by
                                a name, else any; refused if it could mean several

A join is refused if its name or rank is taken by, or if it asks for another kind of group or
another ``world_size`` than, a join that it belongs to: one of its run, or by hand as itself.

Events go in (``join``, ``combine``, ``remove``), decisions come out: ``Admitted`` or ``Refused``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayrpc._protocol.membership import (
    Admitted,
    Decision,
    Member,
    Refused,
    Session,
    SessionState,
    Snapshot,
    not_unique,
    rank_taken,
)
from rayrpc._protocol.pending_joins import PendingJoins

__all__ = ["Group"]

MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not supported. "
    "Static group has a `world_size` set and is a fixed size. Dynamic group has no `world_size` "
    "set and allows ranks to join and leave."
)

# Numbers of sessions that are left for those whose members have not reported to a new directory.
SPARE_NUMBERS = 1000


class Group:
    """All sessions under one key.

    Args:
        key (str): names the group.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.sessions: list[Session] = []
        self.pending = PendingJoins()  # to static groups
        # Whether the group of a run, or "" (by hand, by a name), was static. It is kept from
        # session to session, and at the end for as long as the directory runs.
        self._kinds: dict[str, bool] = {}
        self._sufficient: set[str] = set()  # runs
        self._has_lost = False  # a member or a join since the last ``_forget``
        self._count = 0  # sessions so far

    @classmethod
    def restored(cls, key: str, sessions: Iterable[Session]) -> Group:
        """Return a group of sessions that its members know."""
        group = cls(key)
        for session in sessions:
            group.add(session)
        # members of other sessions may still report
        group._count += SPARE_NUMBERS
        return group

    def add(self, session: Session) -> None:
        """Add a session that its members know."""
        self.sessions.append(session)
        self._count = max(self._count, session.number + 1)
        for member in session.deciding:
            self._note(member)

    # -- events -------------------------------------------------------------------------------

    def join(self, request: Member) -> list[Decision]:
        """Decide on a join, and on the pending joins that it completes."""
        self._forget()
        if request.is_guest and (sessions := self._open_to_guest(request)):
            return [self._join_as_guest(request, sessions)]
        reason = self._refusal(request)
        if reason:
            return [Refused(request.token, reason)]
        self._note(request)
        if request.world_size is None:
            decision = self._join_dynamic(request)
            self._has_lost |= isinstance(decision, Refused)
            return [decision]
        self.pending.add(request)
        for joins in self.pending.belonging_with(request):
            if len(joins) == request.world_size:
                return self._form(joins.values())
        return []

    def combine(self, starters: bool = False) -> list[Decision]:
        """Form groups of the pending joins of several runs; call it when no more joins come.

        Args:
            starters: of processes, too, that would suffice with those that they have started.
        """
        decisions: list[Decision] = []
        for world_size in {m.world_size for m in self.pending}:
            decisions += self._form(
                m
                for m in self.pending
                if m.world_size == world_size
                and self._is_open(m)
                and (starters or not 0 < m.origin.started >= (world_size or 0) - 1)
            )
        return decisions

    def remove(self, token: str, kind: str, cause: str = "") -> bool:
        """Remove a member or a pending join; see ``Session.remove``."""
        self._has_lost = True
        if self.pending.remove(token):
            return True
        session = self.find(token)
        return session is not None and session.remove(token, kind, cause)

    def _note(self, request: Member) -> None:
        """Note what kind of group a run forms, and whether its ranks suffice for it."""
        is_static = request.world_size is not None
        self._kinds.update((scope, is_static) for scope in _scopes(request))
        origin = request.origin
        if is_static and origin.launched and origin.ranks >= (request.world_size or 0):
            self._sufficient.add(origin.run)

    # -- looking ------------------------------------------------------------------------------

    def find(self, token: str) -> Session | None:
        """Return the session of a member."""
        return next((s for s in self.sessions if token in s.members), None)

    def by_number(self, number: int) -> Session | None:
        """Return the session with a number."""
        return next((s for s in self.sessions if s.number == number), None)

    def missing(self, token: str) -> list[int]:
        """Return the ranks that a pending join waits for."""
        one = self.pending.get(token)
        if one is None:
            return []
        joined = {
            m.id
            for m in self.pending
            if m.world_size == one.world_size
            and (_belong(m, one) or (self._is_open(m) and self._is_open(one)))
        }
        return [rank for rank in range(one.world_size or 0) if rank not in joined]

    def other_users(self, member: Member) -> str:
        """Return by whom the key is used beside a member's own run; empty: nobody."""
        mine = str(member.origin)
        users = dict.fromkeys(str(m.origin) for m in self.everyone() if not _same_run(m, member))
        return "; ".join(user for user in users if user != mine)

    @property
    def is_new(self) -> bool:
        """Tell whether there was no join yet."""
        return not self._kinds

    @property
    def is_empty(self) -> bool:
        """Tell whether all sessions have ended."""
        return not self.pending and all(s.is_over for s in self.sessions)

    def everyone(self) -> list[Member]:
        """Return the members of all sessions, and those who wait for theirs."""
        members = [m for s in self.sessions for m in s.members.values()]
        return [*members, *self.pending]

    # -- inside -------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Forget sessions that are over, and runs that have ended, unless all have."""
        if not self._has_lost:
            return
        self.sessions = [s for s in self.sessions if not s.is_over]
        if not self.is_empty:
            self._has_lost = False
            deciding = [m for s in self.sessions for m in s.deciding]
            scopes = {scope for m in (*deciding, *self.pending) for scope in _scopes(m)}
            self._kinds = {scope: kind for scope, kind in self._kinds.items() if scope in scopes}
            self._sufficient &= scopes

    def _refusal(self, request: Member) -> str:
        """Return why a join is refused; empty: it is not."""
        is_static = request.world_size is not None
        if any(self._kinds.get(scope, is_static) != is_static for scope in _scopes(request)):
            return f"{MIXED} {self._used_by(self.everyone())}"
        if not is_static:
            return ""
        for session in self.sessions:
            members = list(session.workers)
            if session.state is SessionState.COMPLETE and any(_belong(m, request) for m in members):
                names = ", ".join(sorted(m.name for m in members))
                return (
                    f"RPC group {self.key!r} is complete: its {len(members)} workers ({names}) "
                    f"are alive. {self._used_by(members)} Wait until that run has ended, or use "
                    "another MASTER_PORT or init_method."
                )
        for joins in self.pending.belonging_with(request):
            other = next(iter(joins.values()), request)
            if other.world_size != request.world_size:
                return (
                    f"RPC worker {request.name!r} (rank {request.id}) asks for world_size "
                    f"{request.world_size}, but the group is being formed with world_size "
                    f"{other.world_size}. {self._used_by([other])} Give every worker the same "
                    "world_size."
                )
            if request.id in joins:
                return rank_taken(request, joins[request.id])
        return ""

    def _used_by(self, members: Sequence[Member]) -> str:
        users = dict.fromkeys(str(m.origin) for m in members)
        return f"The key is used by: {'; '.join(users)}." if users else ""

    def _is_open(self, member: Member) -> bool:
        """Tell whether a pending join may be in a group with those of other runs."""
        return member.origin.run not in self._sufficient

    def _join_dynamic(self, request: Member) -> Decision:
        met = self._met(request, [s for s in self.sessions if s.state is SessionState.OPEN])
        if met:
            return met[0].join(request)
        users = self.other_users(request)
        admitted = self._new_session().join(request)
        if users and not request.origin.launched and isinstance(admitted, Admitted):
            note = (
                f"RPC worker {request.name!r} is in a new group: that of {users} has the same key "
                f"{self.key!r}, but its program has started its ranks. To join it, name the group "
                "by init_method='ray://NAME' in both"
            )
            return admitted._replace(snapshot=admitted.snapshot._replace(note=note))
        return admitted

    def _met(self, request: Member, sessions: Sequence[Session]) -> list[Session]:
        """Return the sessions of a join's run; if there are none, those met by the key."""
        for meets in (_same_run, _meet_by_key):
            met = [s for s in sessions if any(meets(m, request) for m in s.deciding)]
            if met:
                return met
        return []

    def _open_to_guest(self, guest: Member) -> list[Session]:
        """Return the sessions with workers that a guest may mean."""
        there = [session for session in self.sessions if session.workers]
        found = self._met(guest, there) or there
        return [s for s in found if s.state is not SessionState.BROKEN] or found

    def _join_as_guest(self, guest: Member, sessions: Sequence[Session]) -> Decision:
        if len(sessions) == 1:
            return sessions[0].join(guest)
        users = self._used_by([member for session in sessions for member in session.workers])
        reason = (
            f"{len(sessions)} groups have the key {self.key!r}, and a guest cannot tell which it "
            f"is to join. {users} Give each a name of its own: the setting group, or "
            "init_method='ray://NAME'."
        )
        return Refused(guest.token, reason)

    def _new_session(self, members: Sequence[Member] = ()) -> Session:
        session = Session(self._count, members)
        self._count += 1
        self.sessions.append(session)
        return session

    def _form(self, joins: Iterable[Member]) -> list[Decision]:
        """Form a static group of pending joins of one world_size, if all its ranks are there."""
        by_rank: dict[int, Member] = {}
        for join in joins:
            by_rank.setdefault(join.id, join)
        if not by_rank or len(by_rank) < (next(iter(by_rank.values())).world_size or 0):
            return []
        members = [by_rank[rank] for rank in sorted(by_rank)]
        by_name: dict[str, Member] = {}
        for member in members:
            self.pending.remove(member.token)
        for member in members:
            if member.name in by_name:
                self._has_lost = True
                reason = not_unique(member, by_name[member.name])
                return [Refused(m.token, reason) for m in members]
            by_name[member.name] = member
        session = self._new_session(members)
        return [Admitted(m.token, Snapshot(session.number, m, members, 0)) for m in members]


def _same_run(one: Member, other: Member) -> bool:
    return one.origin.run == other.origin.run != ""


def _belong(one: Member, other: Member) -> bool:
    """Tell whether joins to a static group can only be meant for the same one."""
    return _same_run(one, other) or (one.origin.is_by_hand and other.origin.is_by_hand)


def _meets_by_key(member: Member) -> bool:
    return member.named or not member.origin.launched


def _meet_by_key(one: Member, other: Member) -> bool:
    """Tell whether joins of two runs to a dynamic group meet."""
    return _meets_by_key(one) and _meets_by_key(other)


def _scopes(member: Member) -> set[str]:
    """Return the run of a member, and "" if it belongs to others by the key alone."""
    is_static = member.world_size is not None
    by_key = member.origin.is_by_hand if is_static else _meets_by_key(member)
    return {member.origin.run} | ({""} if by_key else set())
