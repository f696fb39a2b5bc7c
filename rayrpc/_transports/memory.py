"""A transport and a directory for workers of one process: tests of everything above them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Change, Decision, Group, Member, Refused, Session, Snapshot
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Directory, Pending, PendingReply, Serve, Transport, copied
from rayrpc.errors import GroupError, WorkerDiedError

__all__ = ["MemoryDirectory", "MemoryHub", "MemoryTransport"]

# A follower that is stuck must not hold up those who join or leave for good.
SEEN_SECONDS = 5.0


class MemoryHub:
    """Where the transports and the directories of one process find one another."""

    def __init__(self) -> None:
        self.serving: dict[str, Serve] = {}
        self.changed = threading.Condition()  # guards what follows
        self.groups: dict[str, Group] = {}
        self.decisions: dict[str, Decision] = {}  # by token, until its join reads it
        self.seen: dict[str, int] = {}  # the version that each follower has applied


class MemoryTransport(Transport):
    """Call peers of the same process by a thread each.

    Args:
        hub (MemoryHub): shared by the transports that can reach one another.
        address (str): this worker's address on the hub.
    """

    name = "memory"

    def __init__(self, hub: MemoryHub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._threads = ThreadCache(f"rayrpc-memory-{address}")
        self._lock = threading.Lock()
        # by token of the peer; whoever will complete a call keeps it alive
        self._pending: defaultdict[str, WeakSet[PendingReply]] = defaultdict(WeakSet)

    @property
    def address(self) -> Any:
        return self._address

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._hub.serving[self._address] = serve

    def call(self, peer: Member, frame: Frame) -> Pending:
        pending = PendingReply()
        serve = self._hub.serving.get(peer.address)
        if serve is None:
            pending.complete(Error(WorkerDiedError(peer.name, "it does not serve", peer.node)))
            return pending
        arrived = copied(frame)
        with self._lock:
            self._pending[peer.token].add(pending)
        self._threads.submit(lambda: pending.serve(serve, arrived))
        return pending

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            pending = list(self._pending.pop(peer.token, ()))
        for call in pending:
            call.complete(Error(error))

    def close(self) -> None:
        self._hub.serving.pop(self._address, None)
        self._threads.close()


class MemoryDirectory(Directory):
    """Run a group's membership in this process.

    Args:
        hub (MemoryHub): shared by the members of all its groups.
        key (str): names the group.
    """

    def __init__(self, hub: MemoryHub, key: str) -> None:
        self._hub = hub
        self._key = key
        self._token = ""
        self._closed = False

    def join(self, member: Member, timeout: float) -> Snapshot:
        hub = self._hub
        with hub.changed:
            group = hub.groups.setdefault(self._key, Group(self._key))
            _, decisions = group.join(member)
            hub.decisions.update((decision.token, decision) for decision in decisions)
            hub.changed.notify_all()
            hub.changed.wait_for(lambda: member.token in hub.decisions, timeout)
            decision = hub.decisions.pop(member.token, None)
            if decision is None:
                session = group.find(member.token)
                missing = session.missing() if session is not None else []
                self._remove(member.token, "left")
                raise GroupError(
                    f"RPC worker {member.name!r} waited {timeout:g} s for group {self._key!r} to "
                    f"be complete: of world_size {member.world_size}, ranks {missing} are missing."
                )
            if isinstance(decision, Refused):
                raise GroupError(decision.reason)
            self._token = member.token
            self._wait_seen(decision.snapshot.version)
            return decision.snapshot

    def follow(self, version: int, apply: Callable[[list[Change]], None]) -> None:
        hub = self._hub

        def news(seen: int) -> list[Change] | None:
            with hub.changed:
                hub.seen[self._token] = seen
                hub.changed.notify_all()
                while not self._closed and (session := self._session()) is not None:
                    if session.version > seen:
                        return session.since(seen)
                    hub.changed.wait()
                hub.seen.pop(self._token, None)
                hub.changed.notify_all()
                return None

        def run() -> None:
            seen = version
            while (changes := news(seen)) is not None:
                apply(changes)
                seen = changes[-1].version

        with hub.changed:
            hub.seen[self._token] = version
        threading.Thread(target=run, name="rayrpc-directory", daemon=True).start()

    def members(self) -> list[Member]:
        with self._hub.changed:
            session = self._session()
            return list(session.members.values()) if session is not None else []

    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        hub = self._hub
        with hub.changed:
            session = self._session()
            if session is None:
                return {}
            session.report(tag, self._token, payload)
            hub.changed.notify_all()
            if not hub.changed.wait_for(lambda: session.reached(tag) is not None, timeout):
                names = ", ".join(session.absent(tag))
                raise GroupError(
                    f"waited {timeout:g} s at {tag!r} for workers that did not come: {names}."
                )
            return session.reached(tag) or {}

    def leave(self) -> None:
        self._end("left")

    def die(self, cause: str) -> None:
        """Take this worker out as one that died; the others see it before this returns."""
        self._end("died", cause)

    def close(self) -> None:
        with self._hub.changed:
            self._closed = True
            self._hub.seen.pop(self._token, None)
            self._hub.changed.notify_all()

    # -- inside; all of it with the hub's lock held -------------------------------------------

    def _session(self) -> Session | None:
        group = self._hub.groups.get(self._key)
        return group.find(self._token) if group is not None else None

    def _end(self, kind: str, cause: str = "") -> None:
        with self._hub.changed:
            session = self._session()
            if session is not None:
                self._remove(self._token, kind, cause)
                self._wait_seen(session.version, session)

    def _remove(self, token: str, kind: str, cause: str = "") -> None:
        session = self._hub.groups[self._key].find(token)
        if session is not None:
            session.remove(token, kind, cause)
        self._hub.changed.notify_all()

    def _wait_seen(self, version: int, session: Session | None = None) -> None:
        """Wait until every other follower in the session has applied ``version``."""
        hub = self._hub
        session = session or self._session()
        assert session is not None

        def seen() -> bool:
            return all(
                hub.seen.get(token, version) >= version
                for token in session.members
                if token != self._token
            )

        hub.changed.wait_for(seen, SEEN_SECONDS)
