"""The directory of a group on Ray: a named, detached actor that runs the pure ``Group``.

It watches the stand-in of every member, so that a death is known within milliseconds, and tells
the others by answering the poll that each of them keeps open.  It ends itself when its group has
been empty for a moment; it has no owner whose death could take it along.
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

from rayrpc._protocol.membership import Admitted, Change, Decision, Group, Member, Snapshot
from rayrpc._protocol.transport import Directory
from rayrpc._transports.ray.transport import cause_of
from rayrpc.errors import GroupError

__all__ = ["DirectoryActor", "RayDirectory"]

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
LINGER_AFTER_DEATH_SECONDS = 5.0
LINGER_AT_FIRST_SECONDS = 30.0  # whoever made us has not joined yet
JOIN_SEEN_SECONDS = 5.0


class DirectoryActor:
    """Serve one group's membership to its members.

    Args:
        key (str): names the group.
    """

    def __init__(self, key: str) -> None:
        self._group = Group(key)
        self._secret = os.urandom(32)
        self._joins: dict[str, asyncio.Future[Snapshot | str]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._seen: dict[str, int] = {}  # the version that each member has applied
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._died = False
        self._spawn(self._end_when_empty())

    def __repr__(self) -> str:
        return f"rayrpc.Directory({self._group.key})"

    async def ready(self) -> None:
        """Return as soon as this actor runs."""

    async def join(self, member: Member) -> Snapshot | str:
        """Return the member's snapshot once it is admitted, or why it is refused."""
        answer = self._joins[member.token] = asyncio.get_running_loop().create_future()
        self._spawn(self._watch(member))
        _, decisions = self._group.join(member)
        await self._settle(decisions)
        snapshot: Snapshot | str = await answer
        if isinstance(snapshot, str):
            return snapshot
        if member.world_size is None:
            await self._all_see(member.token, snapshot.version)
        return snapshot._replace(secret=self._secret)

    async def decided(self, token: str) -> None:
        """Return when the member is admitted, refused, or gone."""
        gate = self._gates.setdefault(token, asyncio.Event())
        await gate.wait()
        self._gates.pop(token, None)

    async def withdraw(self, token: str) -> list[int]:
        """Take back a join that waited too long; return the ranks that are missing."""
        session = self._group.find(token)
        missing = session.missing() if session is not None else []
        await self._remove(token, "left")
        return missing

    async def leave(self, token: str) -> None:
        """Take a member out."""
        await self._remove(token, "left")

    async def poll(self, token: str, version: int) -> list[Change] | None:
        """Return the changes after ``version`` as soon as there are any; None: not a member."""
        session = self._group.find(token)
        self._seen[token] = version
        async with self._changed:
            self._changed.notify_all()
            while session is not None and token in session.members:
                if session.version > version:
                    return session.since(version)
                await self._changed.wait()
        return None

    async def members(self, token: str) -> list[Member]:
        """Return who is in the member's session."""
        session = self._group.find(token)
        return list(session.members.values()) if session is not None else []

    async def sync(self, tag: str, token: str, payload: Any) -> dict[str, Any]:
        """Return what all members that are left reported at ``tag``, once they have."""
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

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_event_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._open_gate(decision.token)
            answer = self._joins.pop(decision.token, None)
            if answer is not None and not answer.done():
                admitted = isinstance(decision, Admitted)
                answer.set_result(decision.snapshot if admitted else decision.reason)  # type: ignore[union-attr]
        async with self._changed:
            self._changed.notify_all()

    async def _all_see(self, token: str, version: int) -> None:
        """Wait until every other member has applied ``version``."""

        def seen() -> bool:
            session = self._group.find(token)
            others = session.members if session is not None else {}
            return all(self._seen.get(t, 0) >= version for t in others if t != token)

        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(seen), JOIN_SEEN_SECONDS)

    async def _watch(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                actor = await loop.run_in_executor(None, member.address.find)
                await actor.watch.remote(member.token)
                kind, cause = "left", ""
            except ValueError:
                kind, cause = "died", "it ended while it joined"
            except ActorUnavailableError:
                await asyncio.sleep(0.2)  # a passing fault of the network; look again
                continue
            except RayError as exc:
                kind, cause = "died", cause_of(exc)
            break
        await self._remove(member.token, kind, cause)

    def _open_gate(self, token: str) -> None:
        if token in self._gates:
            self._gates[token].set()

    async def _remove(self, token: str, kind: str, cause: str = "") -> None:
        session = self._group.find(token)
        if session is not None and session.remove(token, kind, cause) and kind == "died":
            self._died = True
        self._open_gate(token)
        answer = self._joins.pop(token, None)
        if answer is not None and not answer.done():
            answer.set_result(cause or "it left before the group was complete")
        self._seen.pop(token, None)
        async with self._changed:
            self._changed.notify_all()

    def _patience(self) -> float:
        """Return how many seconds to stay without members."""
        if self._group.was_static is None:
            return LINGER_AT_FIRST_SECONDS
        return LINGER_AFTER_DEATH_SECONDS if self._died else LINGER_SECONDS

    async def _end_when_empty(self) -> None:
        empty_since: float | None = None
        while True:
            await asyncio.sleep(LINGER_SECONDS / 4)
            if not self._group.is_empty or self._joins:
                empty_since = None
            elif empty_since is None:
                empty_since = time.monotonic()
            elif time.monotonic() - empty_since > self._patience():
                ray.kill(ray.get_runtime_context().current_actor)
                return


class RayDirectory(Directory):
    """Reach the directory of a group from one of its members.

    Args:
        key (str): names the group.
        namespace (str): Ray namespace of the directory's name.
    """

    def __init__(self, key: str, namespace: str) -> None:
        self._key = key
        self._namespace = namespace
        self._token = ""
        self._closed = False
        self._actor: Any = None

    def _open(self) -> Any:
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
        """Wait until the directory runs, started if need be.

        Raises:
            GroupError: it does not in ``timeout`` seconds.
        """
        try:
            self._ask(lambda actor: actor.ready.remote(), timeout)
        except GetTimeoutError:
            raise GroupError(
                f"the directory of group {self._key!r} did not start in {timeout:g} s: is the "
                "Ray cluster out of memory or of processes? `ray list actors` shows its state."
            ) from None

    def decided(self, token: str) -> Any:
        """Return an ObjectRef that is ready when the directory has decided on a join."""
        return self._actor.decided.remote(token)

    def join(self, member: Member, timeout: float) -> Snapshot:
        try:
            answer = self._ask(lambda actor: actor.join.remote(member), timeout)
        except GetTimeoutError:
            raise self._incomplete(member, timeout) from None
        if isinstance(answer, str):
            raise GroupError(answer)
        self._token = member.token
        return answer  # type: ignore[no-any-return]

    def _ask(self, question: Callable[[Any], Any], timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            self._actor = self._open()
            left = max(0.0, deadline - time.monotonic())
            try:
                return ray.get(question(self._actor), timeout=left)
            except RayActorError as exc:
                # the directory of an earlier run was just ending itself
                if time.monotonic() > deadline:
                    raise GroupError(
                        f"cannot reach the directory of group {self._key!r}: {cause_of(exc)}"
                    ) from exc
                time.sleep(0.05)

    def _incomplete(self, member: Member, timeout: float) -> GroupError:
        missing = ray.get(self._actor.withdraw.remote(member.token), timeout=10)
        ranks = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        return GroupError(
            f"RPC worker {member.name!r} waited {timeout:g} s for group {self._key!r} to be "
            f"complete: of world_size {member.world_size}, {ranks} missing. Start the missing "
            "workers with the same MASTER_ADDR and MASTER_PORT (or init_method) and on the same "
            "Ray cluster, or raise init_timeout."
        )

    def follow(self, version: int, apply: Callable[[list[Change]], None]) -> None:
        def run() -> None:
            seen = version
            while not self._closed:
                try:
                    changes = ray.get(self._actor.poll.remote(self._token, seen))
                except Exception as exc:
                    if not self._closed:
                        logger.warning(
                            "lost the directory of group %s: %s", self._key, cause_of(exc)
                        )
                    return
                if changes is None:
                    return
                apply(changes)
                seen = changes[-1].version

        threading.Thread(target=run, name="rayrpc-directory", daemon=True).start()

    def members(self) -> list[Member]:
        return ray.get(self._actor.members.remote(self._token))  # type: ignore[no-any-return]

    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        ref = self._actor.sync.remote(tag, self._token, payload)
        try:
            return ray.get(ref, timeout=timeout)  # type: ignore[no-any-return]
        except GetTimeoutError:
            names = ", ".join(ray.get(self._actor.absent.remote(tag, self._token), timeout=10))
            raise GroupError(
                f"waited {timeout:g} s at {tag!r} for workers that did not come: {names}. They "
                "are alive but busy or blocked; call shutdown() on every worker."
            ) from None
        except RayActorError as exc:
            raise GroupError(
                f"the directory of group {self._key!r} is gone: {cause_of(exc)}"
            ) from exc

    def leave(self) -> None:
        if not ray.is_initialized():  # any more: it saw us go
            return
        with contextlib.suppress(RayError):
            ray.get(self._actor.leave.remote(self._token), timeout=10)

    def close(self) -> None:
        self._closed = True
