"""The directory of a group on Ray: a named, detached actor that runs the pure ``Group``.

    member ──join──> directory ──watch──> the member's actor endpoint
    member ──poll(version)──> directory   returns when the membership changes

The directory keeps a call of ``watch`` open on every member's endpoint, which Ray fails within
milliseconds of a death; it then answers the poll that each member keeps open.

The first member to need the directory creates it.  It is detached, so that no member's death ends
it, and ends itself when its group has been empty for a while:

    CREATED ──(first join)──> IN USE ──(all left or died)──> EMPTY ──(linger time)──> ended
                                 ^                             │
                                 └────────── join ─────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._protocol.membership import Admitted, Change, Decision, Group, Member, Snapshot
from rayrpc._protocol.transport import Directory
from rayrpc._transports.ray.ray_errors import cause_of
from rayrpc.errors import GroupError

__all__ = ["DirectoryActor", "RayDirectory"]

logger = logging.getLogger(__name__)

# How long a directory without members stays, and how often it looks.
LINGER_SECONDS = 1.0
LINGER_AFTER_DEATH_SECONDS = 5.0  # members that join late learn what kind of group it was
LINGER_AT_FIRST_SECONDS = 30.0  # the member that created it has not joined yet
LINGER_POLL_SECONDS = 0.25

# How long a join to a dynamic group waits until the other members have applied it.
APPLIED_SECONDS = 5.0

# Pauses before another attempt.
WATCH_RETRY_SECONDS = 0.2
CALL_RETRY_SECONDS = 0.05

# How long a member waits for a directory that need not wait for other members.
ANSWER_SECONDS = 10.0


class DirectoryActor:
    """Serve the membership of one group.

    Args:
        key (str): names the group.
    """

    def __init__(self, key: str) -> None:
        self._group = Group(key)
        self._secret = os.urandom(32)
        self._joins: dict[str, asyncio.Future[Snapshot | str]] = {}  # undecided, by token
        self._decided: dict[str, asyncio.Event] = {}  # by token, while a relay waits for it
        self._applied: dict[str, int] = {}  # by token: the version that the member has applied
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps none alive
        self._any_died = False
        self._start(self._end_when_empty())

    def __repr__(self) -> str:
        return f"rayrpc.Directory({self._group.key})"

    async def ready(self) -> None:
        """Return once this actor runs."""

    async def join(self, member: Member) -> Snapshot | str:
        """Decide on a join.

        Returns:
            The snapshot, once the member is admitted and the others know it; or why it is refused.
        """
        answer = self._joins[member.token] = asyncio.get_running_loop().create_future()
        self._start(self._watch(member))
        _, decisions = self._group.join(member)
        await self._settle(decisions)
        snapshot: Snapshot | str = await answer
        if isinstance(snapshot, str):
            return snapshot
        if member.world_size is None:
            await self._wait_applied(member.token, snapshot.version)
        return snapshot._replace(secret=self._secret)

    async def decided(self, token: str) -> None:
        """Return when the member is admitted or refused, or was removed."""
        event = self._decided.setdefault(token, asyncio.Event())
        await event.wait()
        self._decided.pop(token, None)

    async def withdraw(self, token: str) -> list[int]:
        """Cancel a join that took too long; return the ranks that are missing."""
        session = self._group.find(token)
        missing = session.missing() if session is not None else []
        await self._remove(token, "left")
        return missing

    async def leave(self, token: str) -> None:
        """Remove a member that leaves."""
        await self._remove(token, "left")

    async def poll(self, token: str, version: int) -> list[Change] | None:
        """Wait for changes.

        Args:
            token: of the member.
            version: the last one that the member has applied.

        Returns:
            The changes after ``version``; None if it is no member any more.
        """
        session = self._group.find(token)
        self._applied[token] = version
        async with self._changed:
            self._changed.notify_all()
            while session is not None and token in session.members:
                if session.version > version:
                    return session.since(version)
                await self._changed.wait()
        return None

    async def members(self, token: str) -> list[Member]:
        """Return the members of this member's session."""
        session = self._group.find(token)
        return list(session.members.values()) if session is not None else []

    async def sync(self, tag: str, token: str, payload: Any) -> dict[str, Any]:
        """Wait at the barrier ``tag``.

        Returns:
            The members' payloads by name, once all members that did not leave or die reached it.
        """
        session = self._group.find(token)
        if session is None:
            return {}
        async with self._changed:
            session.report(tag, token, payload)
            self._changed.notify_all()
            while (reports := session.reached(tag)) is None:
                await self._changed.wait()
            return reports

    async def absent(self, tag: str, token: str) -> list[str]:
        """Return the names of the members that have not reached ``tag``."""
        session = self._group.find(token)
        return session.absent(tag) if session is not None else []

    # -- inside -----------------------------------------------------------------------------

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_event_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._set_decided(decision.token)
            answer = self._joins.pop(decision.token, None)
            if answer is not None and not answer.done():
                admitted = isinstance(decision, Admitted)
                answer.set_result(decision.snapshot if admitted else decision.reason)  # type: ignore[union-attr]
        async with self._changed:
            self._changed.notify_all()

    async def _wait_applied(self, token: str, version: int) -> None:
        """Wait until every other member has applied ``version``, but not for a stuck one."""

        def is_applied() -> bool:
            session = self._group.find(token)
            others = session.members if session is not None else {}
            return all(self._applied.get(t, 0) >= version for t in others if t != token)

        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(is_applied), APPLIED_SECONDS)

    async def _watch(self, member: Member) -> None:
        """Remove a member when it leaves or dies."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                actor = await loop.run_in_executor(None, member.address.find)
                await actor.watch.remote(member.token)
                kind, cause = "left", ""
            except ValueError:
                kind, cause = "died", "it died while it joined"
            except ActorUnavailableError:
                await asyncio.sleep(WATCH_RETRY_SECONDS)  # a broken connection, not a death
                continue
            except RayError as exc:
                kind, cause = "died", cause_of(exc)
            break
        await self._remove(member.token, kind, cause)

    def _set_decided(self, token: str) -> None:
        if token in self._decided:
            self._decided[token].set()

    async def _remove(self, token: str, kind: str, cause: str = "") -> None:
        session = self._group.find(token)
        if session is not None and session.remove(token, kind, cause) and kind == "died":
            self._any_died = True
        self._set_decided(token)
        answer = self._joins.pop(token, None)
        if answer is not None and not answer.done():
            answer.set_result(cause or "it left before the group was complete")
        self._applied.pop(token, None)
        async with self._changed:
            self._changed.notify_all()

    def _linger_seconds(self) -> float:
        """Return how many seconds to stay without members."""
        if self._group.was_static is None:
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


class RayDirectory(Directory):
    """Call the directory of a group from one of its members.

    Args:
        key (str): names the group.
        namespace (str): Ray namespace of the directory's name.
    """

    def __init__(self, key: str, namespace: str) -> None:
        self._key = key
        self._namespace = namespace
        self._worker = ""
        self._token = ""
        self._closed = False
        self._actor: Any = None

    def _find_or_create(self) -> Any:
        directory: Any = ray.remote(DirectoryActor)
        return directory.options(
            name=f"rayrpc-directory:{self._key}",
            namespace=self._namespace,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=100_000,
        ).remote(self._key)

    def reach(self, timeout: float) -> None:
        """Wait until the directory runs; create it if there is none.

        Args:
            timeout: in seconds.

        Raises:
            GroupError: it does not run in time.
        """
        try:
            self._call(lambda actor: actor.ready.remote(), timeout)
        except GetTimeoutError:
            raise GroupError(
                f"the directory of RPC group {self._key!r} did not start in {timeout:g} s. Check "
                "with `ray list actors` whether the Ray cluster is out of memory or of processes."
            ) from None

    def decided(self, token: str) -> Any:
        """Return an ObjectRef that is ready when the directory has decided on a join."""
        return self._actor.decided.remote(token)

    def join(self, member: Member, timeout: float) -> Snapshot:
        self._worker = member.name
        try:
            answer = self._call(lambda actor: actor.join.remote(member), timeout)
        except GetTimeoutError:
            raise self._incomplete(member, timeout) from None
        if isinstance(answer, str):
            raise GroupError(answer)
        self._token = member.token
        return answer  # type: ignore[no-any-return]

    def _call(self, call: Callable[[Any], Any], timeout: float) -> Any:
        deadline = Deadline(timeout)
        while True:
            self._actor = self._find_or_create()
            try:
                return ray.get(call(self._actor), timeout=deadline.remaining())
            except RayActorError as exc:
                # the directory of an earlier run may have ended itself just now
                if deadline.expired:
                    raise GroupError(
                        f"the directory of RPC group {self._key!r} cannot be reached: "
                        f"{cause_of(exc)}. Check with `ray status` that the Ray cluster runs."
                    ) from exc
                time.sleep(CALL_RETRY_SECONDS)

    def _incomplete(self, member: Member, timeout: float) -> GroupError:
        missing = ray.get(self._actor.withdraw.remote(member.token), timeout=ANSWER_SECONDS)
        ranks = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        return GroupError(
            f"RPC worker {member.name!r} waited {timeout:g} s for group {self._key!r} to be "
            f"complete: of world_size {member.world_size}, {ranks} missing. Start the missing "
            "workers with the same MASTER_ADDR and MASTER_PORT (or init_method) and on the same "
            "Ray cluster, or raise init_timeout."
        )

    def follow(self, version: int, apply: Callable[[list[Change]], None]) -> None:
        def run() -> None:
            applied = version
            while not self._closed:
                try:
                    changes = ray.get(self._actor.poll.remote(self._token, applied))
                except Exception as exc:
                    if not self._closed:
                        logger.warning(
                            "RPC worker %r lost the directory of group %r (%s): it does not "
                            "learn any more who joins, leaves or dies",
                            self._worker,
                            self._key,
                            cause_of(exc),
                        )
                    return
                if changes is None:
                    return
                apply(changes)
                applied = changes[-1].version

        threading.Thread(target=run, name="rayrpc-directory", daemon=True).start()

    def members(self) -> list[Member]:
        return ray.get(self._actor.members.remote(self._token))  # type: ignore[no-any-return]

    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        ref = self._actor.sync.remote(tag, self._token, payload)
        try:
            return ray.get(ref, timeout=timeout)  # type: ignore[no-any-return]
        except GetTimeoutError:
            absent = self._actor.absent.remote(tag, self._token)
            names = ", ".join(ray.get(absent, timeout=ANSWER_SECONDS))
            raise GroupError(
                f"RPC worker {self._worker!r} waited {timeout:g} s at {tag!r} for workers that "
                f"did not reach it: {names}. They are alive but busy or blocked; call shutdown() "
                "on every worker."
            ) from None
        except RayActorError as exc:
            raise GroupError(
                f"RPC worker {self._worker!r} waited at {tag!r}, but the directory of group "
                f"{self._key!r} has died: {cause_of(exc)}. Restart the run."
            ) from exc

    def leave(self) -> None:
        if not ray.is_initialized():  # then the directory saw the end of this process's connection
            return
        with contextlib.suppress(RayError):
            ray.get(self._actor.leave.remote(self._token), timeout=ANSWER_SECONDS)

    def close(self) -> None:
        self._closed = True
