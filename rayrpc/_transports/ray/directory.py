"""The directory of a group on Ray: a named, detached actor that runs the pure ``Group``.

    member ──join──> directory ──watch──> the member's actor endpoint
    member ──poll(version)──> directory   returns when the membership changes

The directory keeps a call of ``watch`` open on every member's endpoint, which Ray fails within
milliseconds of a death; it then answers the poll that each member keeps open.  Hosts that do not
answer it finds by ``host_monitor``.

Ray starts it again when it dies.  It has then forgotten its group, and rebuilds it from its
members: the answer to their next poll tells them so, and they call ``restore``.

The first member to need the directory creates it.  It is detached, so that no member's death ends
it, and ends itself when its group has been empty for a while:

    CREATED ──(first join)──> IN USE ──(all left or died)──> EMPTY ──(linger time)──> ended
                                 ^                             │
                                 └────────── join ─────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import Admitted, Change, Decision, Member, Session, Snapshot
from rayrpc._protocol.rebuild import Rebuild, Report
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.applied_versions import AppliedVersions
from rayrpc._transports.ray.directory_answers import (
    MOST_MEMBERS,
    WANTS_MEMBERS,
    Description,
    Restored,
    SharedReports,
    SharedSnapshot,
    poll_seconds,
)
from rayrpc._transports.ray.endpoint_watch import EndpointWatch
from rayrpc._transports.ray.host_monitor import PROBE_SECONDS, HostMonitor, raylets
from rayrpc._transports.ray.raylet_watch import end_with_raylet

__all__ = ["DirectoryActor"]

# How long a directory without members stays, and how often it looks.
LINGER_SECONDS = 1.0
LINGER_AFTER_DEATH_SECONDS = 5.0  # members that join late learn what kind of group it was
LINGER_AT_FIRST_SECONDS = 30.0  # the member that created it has not joined yet
LINGER_POLL_SECONDS = 0.25

# After so long without a join, the ranks that programs have started are taken to be all; and what
# a process that is a rank itself has started is taken to be no ranks.
QUIET_SECONDS = 3.0
STARTER_SECONDS = 20.0

# How long a join to a dynamic group waits until the other members have applied it.
APPLIED_SECONDS = 5.0

# How long a directory that was restarted waits for reports; it takes no joins meanwhile.
REBUILD_SECONDS = 5.0


class DirectoryActor:
    """Serve the membership of one group.

    Args:
        key (str): names the group.
        peer_timeout (float): after so many seconds of silence a host's members are lost.
    """

    def __init__(self, key: str, peer_timeout: float) -> None:
        end_with_raylet()  # Ray starts it again elsewhere
        self._group = Group(key)
        self._peer_timeout = peer_timeout
        self._secret = os.urandom(32)
        self._joins: dict[str, asyncio.Future[Snapshot | str]] = {}  # undecided, by token
        self._applied = AppliedVersions()
        # by session and barrier: what its members have reported there
        self._barriers: dict[tuple[int, str], asyncio.Future[dict[str, Any] | SharedReports]] = {}
        self._raylets: dict[str, int] = {}  # their ports, by host
        self._changed = asyncio.Condition()
        self._shared_members: Any = None  # an ObjectRef of all members of a session ...
        self._shared_state = (-1, -1)  # ... and its number and version
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps none alive
        self._expelled: dict[str, str] = {}  # why members were declared lost, by token
        self._any_died = False
        self._count_joins = 0  # that were not decided at once
        self._known: set[str] = set()  # tokens of those that this process has admitted or restored
        self._watch = EndpointWatch(self._remove)
        self._rebuild = Rebuild(key)
        self._is_built = asyncio.Event()
        self._was_restarted = ray_api.was_restarted()
        if self._was_restarted:
            self._start(self._build())
        else:
            self._is_built.set()
        self._start(self._end_when_empty())
        self._start(self._watch_hosts())

    def __repr__(self) -> str:
        return f"rayrpc.Directory({self._group.key})"

    async def ready(self) -> str:
        """Return the address of this actor's host, once it runs."""
        return str(ray.util.get_node_ip_address())

    async def join(
        self, member: Member, process: Sequence[Any] = ()
    ) -> Snapshot | SharedSnapshot | str:
        """Decide on a join.

        Args:
            member: that wants to join.
            process: an ObjectRef of ``watched``, which the member's process owns, and which Ray
                fails if that dies; an attached worker has no endpoint yet that could be watched.

        Returns:
            The snapshot, once the member is admitted and the others know it; or why it is refused.
        """
        await self._is_built.wait()
        self._known.add(member.token)
        session = self._group.find(member.token)
        if session is not None:  # it was admitted, but has not received the answer
            again = session.snapshot(session.members[member.token])
            return self._shared(again._replace(secret=self._secret))
        answer = self._joins[member.token] = asyncio.get_running_loop().create_future()
        self._start(self._watch.watch(member, process, answer))
        await self._learn_raylets(member.node)
        await self._settle(self._group.join(member))
        if member.token in self._group.pending:
            self._start(self._combine_when_quiet())
        snapshot: Snapshot | str = await answer
        if isinstance(snapshot, str):
            return snapshot
        if member.world_size is None:
            await self._wait_applied(member.token, snapshot.version)
        return self._shared(snapshot._replace(secret=self._secret))

    def _shared(self, snapshot: Snapshot) -> Snapshot | SharedSnapshot:
        """Have the members that join at once read one list of all, where it is long."""
        if len(snapshot.members) <= MOST_MEMBERS:
            return snapshot
        state = snapshot.session, snapshot.version
        if state != self._shared_state:
            self._shared_state = state
            self._shared_members = ray.put(snapshot.members)
        return SharedSnapshot(snapshot._replace(members=[]), self._shared_members)

    async def restore(self, report: Report, members: list[Member] | None = None) -> Restored | str:
        """Take a report of a member that this process does not know.

        Args:
            report: of the member.
            members: all that it knows.

        Returns:
            What it does not know; or WANTS_MEMBERS; or why it is no member any more.
        """
        if not self._rebuild.add(report, members):
            return WANTS_MEMBERS
        member = report.member
        async with self._changed:
            self._changed.notify_all()
        await self._is_built.wait()
        answer = None if member.token in self._expelled else self._rebuild.answer(report)
        self._known.add(member.token)
        async with self._changed:
            self._changed.notify_all()
        if answer is None:
            unknown = "the group lost it before its directory was restarted"
            return self._expelled.get(member.token, unknown)
        session = self._group.find(member.token)
        if session is not None:  # it may have told what a barrier has returned
            self._open_barriers(session)
        self._start(self._watch.watch(member))
        await self._learn_raylets(member.node)
        return Restored(*answer)

    async def watched(self, token: str) -> None:
        """Return when the member's endpoint is watched, or it is no member."""
        await self._watch.wait(token)

    async def withdraw(self, token: str) -> tuple[list[int], str]:
        """Cancel a join that took too long.

        Returns:
            The ranks that are missing, and who uses the key beside the program of this one.
        """
        member = self._group.pending.get(token)
        answer = self._group.missing(token), self._group.other_users(member) if member else ""
        await self._remove(token, "left")
        return answer

    async def leave(self, token: str) -> None:
        """Remove a member that leaves."""
        await self._is_built.wait()
        self._known.add(token)
        await self._remove(token, "left")

    async def expel(self, token: str, cause: str) -> None:
        """Declare a member lost."""
        await self._is_built.wait()
        await self._remove(token, "died", cause)

    async def poll(self, token: str, version: int) -> list[Change] | str | None:
        """Wait for changes.

        Args:
            token: of the member.
            version: the last one that the member has applied.

        Returns:
            The changes after ``version``, none after a part of ``peer_timeout``: the answer tells
            that the directory is there.  A text, why it is no member any more.  None: this process
            does not know it (``restore``).
        """
        if self._was_restarted and token not in self._known:
            return None
        session = self._group.find(token)
        self._applied.note(token, version)
        count = len(session.members) if session is not None else 1
        seconds = poll_seconds(self._peer_timeout, count)

        def has_changes() -> bool:
            return session is None or token not in session.members or session.version > version

        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(has_changes), seconds)
            if session is not None and token in session.members:
                return session.since(version)
        return self._expelled.get(token, "it has left")

    async def members(self, token: str) -> list[Member]:
        """Return the members of this member's session."""
        await self._wait_known(token)
        session = self._group.find(token)
        return list(session.members.values()) if session is not None else []

    async def sync(self, tag: str, token: str, payload: Any) -> dict[str, Any] | SharedReports:
        """Wait at the barrier ``tag``.

        Returns:
            The members' payloads by name, once all members that did not leave or die reached it.
        """
        await self._wait_known(token)
        session = self._group.find(token)
        if session is None:
            return {}
        session.report(tag, token, payload)
        key = session.number, tag
        if key not in self._barriers:
            self._barriers[key] = asyncio.get_running_loop().create_future()
        self._open_barriers(session, [tag])
        return await asyncio.shield(self._barriers[key])  # others wait for it, too

    async def absent(self, tag: str, token: str) -> list[str]:
        """Return the names of the members that have not reached ``tag``."""
        session = self._group.find(token)
        return session.absent(tag) if session is not None else []

    async def describe(self) -> Description:
        """Return who is in the group, for ``rayrpc status``."""
        joining = [(member, self._group.missing(member.token)) for member in self._group.pending]
        sessions = [list(session.members.values()) for session in self._group.sessions]
        return Description(self._group.key, [each for each in sessions if each], joining)

    # -- inside -----------------------------------------------------------------------------

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_event_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_known(self, token: str) -> None:
        """Wait until a member has been admitted, restored or declared lost by this process."""
        if self._was_restarted:
            async with self._changed:
                await self._changed.wait_for(lambda: token in self._known)

    async def _build(self) -> None:
        """Rebuild the group from its members."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._rebuild.is_complete), REBUILD_SECONDS
                )
        self._group = self._rebuild.build()
        self._secret = self._rebuild.secret or self._secret
        for member in self._group.everyone():
            self._start(self._watch.watch(member))
        self._is_built.set()

    async def _settle(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            answer = self._joins.pop(decision.token, None)
            admitted = isinstance(decision, Admitted)
            if not admitted:
                self._watch.let_go(decision.token)  # it will have no endpoint
            if answer is not None and not answer.done():
                answer.set_result(decision.snapshot if admitted else decision.reason)  # type: ignore[union-attr]
        if decisions:
            async with self._changed:
                self._changed.notify_all()

    async def _combine_when_quiet(self) -> None:
        self._count_joins += 1
        count = self._count_joins
        await asyncio.sleep(QUIET_SECONDS)
        if count == self._count_joins:
            await self._settle(self._group.combine())
        await asyncio.sleep(STARTER_SECONDS - QUIET_SECONDS)
        if count == self._count_joins:
            await self._settle(self._group.combine(starters=True))

    async def _wait_applied(self, token: str, version: int) -> None:
        """Wait until every other member has applied ``version``, but not for a stuck one."""
        session = self._group.find(token)
        others = session.members.keys() - {token} if session is not None else set()
        await self._applied.wait(others, version, APPLIED_SECONDS)

    def _open_barriers(self, session: Session, tags: Iterable[str] | None = None) -> None:
        """Let the members of a session go on at the barriers that all have reached.

        Args:
            session: whose.
            tags: of barriers; None: all.
        """
        if tags is None:
            tags = [tag for number, tag in self._barriers if number == session.number]
        for tag in tags:
            barrier = self._barriers[session.number, tag]
            if not barrier.done() and (reports := session.reached(tag)) is not None:
                is_long = len(reports) > MOST_MEMBERS
                barrier.set_result(SharedReports(ray.put(reports)) if is_long else reports)
            if session.is_over:
                del self._barriers[session.number, tag]

    async def _learn_raylets(self, host: str) -> None:
        """Have the port of a host's raylet at hand: once it is silent, Ray may not tell it."""
        if host not in self._raylets:
            with contextlib.suppress(RayError):
                loop = asyncio.get_running_loop()
                self._raylets |= await loop.run_in_executor(None, raylets)

    async def _watch_hosts(self) -> None:
        """Remove the members on hosts that do not answer."""
        here = ray.util.get_node_ip_address()
        monitor = HostMonitor(self._peer_timeout, self._raylets.get)
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            members = [each for each in self._group.everyone() if each.node != here]
            hosts = {member.node for member in members}
            for host, seconds in (await monitor.ask(hosts)).items():
                cause = f"its host {host} has not answered for {seconds:.0f} s"
                for member in members:
                    if member.node == host:
                        await self._remove(member.token, "died", cause)

    async def _remove(self, token: str, kind: str, cause: str = "") -> None:
        session = self._group.find(token)
        if self._group.remove(token, kind, cause) and kind == "died":
            self._any_died = True
            self._expelled[token] = cause
        self._watch.forget(token)
        answer = self._joins.pop(token, None)
        if answer is not None and not answer.done():
            answer.set_result(cause or "it left before the group was complete")
        self._applied.forget(token)
        if session is not None:
            self._open_barriers(session)
        async with self._changed:
            self._changed.notify_all()

    def _linger_seconds(self) -> float:
        """Return how many seconds to stay without members."""
        if self._group.is_new:
            return LINGER_AT_FIRST_SECONDS
        return LINGER_AFTER_DEATH_SECONDS if self._any_died else LINGER_SECONDS

    async def _end_when_empty(self) -> None:
        empty_since: float | None = None
        while True:
            await asyncio.sleep(LINGER_POLL_SECONDS)
            if not self._group.is_empty or self._joins:
                empty_since = None
            elif empty_since is None:
                empty_since = time.monotonic()
            elif time.monotonic() - empty_since > self._linger_seconds():
                ray.kill(ray.get_runtime_context().current_actor)
                return
