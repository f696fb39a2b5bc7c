"""A transport and a directory for workers of one process, to test all layers above them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import (
    Address,
    Change,
    Decision,
    Member,
    Refused,
    Session,
    Snapshot,
)
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Directory, Pending, PendingReply, Serve, Transport, copied
from rayrpc._transports.expected_replies import ExpectedReplies
from rayrpc._transports.serving import ServingThreads
from rayrpc.errors import CallError, GroupError, WorkerDiedError

__all__ = ["MemoryDirectory", "MemoryHub", "MemoryTransport"]

# How long members that join or leave wait for a follower that does not apply a change.
APPLY_SECONDS = 5.0


class MemoryHub:
    """Connect the transports and the directories of one process."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}  # those that serve, by address
        # guards the attributes below; a Condition is enough, as no Ctrl-C comes in the tests
        self.changed = threading.Condition()  # noqa: TID251
        self.groups: dict[str, Group] = {}
        self.decisions: dict[str, Decision] = {}  # by token, until its join reads it
        self.applied: dict[str, int] = {}  # the version that each follower has applied


class MemoryTransport(Transport):
    """Call peers of the same process, each call in a thread of its own.

    Args:
        hub (MemoryHub): shared by the transports that can reach one another.
        address (str): this worker's address on the hub.
        node (str): network address of the node that the worker is to be on; empty for none.
    """

    name = "memory"

    def __init__(self, hub: MemoryHub, address: str, node: str = "") -> None:
        self._hub = hub
        self._address = address
        self._node = node
        self._serve: Serve | None = None
        self._find: Callable[[int], Member | None] = lambda _: None
        self._threads = ThreadCache(f"rayrpc-memory-{address}")
        self._serving = ServingThreads()
        self._lock = threading.Lock()
        # by token of the peer; a call is kept alive by the thread that will complete it
        self._pending: defaultdict[str, WeakSet[PendingReply]] = defaultdict(WeakSet)
        self._replies = ExpectedReplies(lambda worker_id: self._find(worker_id))

    @property
    def address(self) -> Address:
        return self._address

    @property
    def node(self) -> str:
        return self._node

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._threads.start()
        self._serve = serve
        self._find = find
        self._hub.transports[self._address] = self

    def call(self, peer: Member, frame: Frame) -> Pending:
        frame.pending = pending = PendingReply()
        callee = self._hub.transports.get(peer.address)
        if callee is None:
            pending.complete(Error(WorkerDiedError(peer.name, "it does not serve", peer.node)))
            return pending
        arrived = copied(frame)
        with self._lock:
            self._pending[peer.token].add(pending)

        def answer() -> None:
            frame.begin_to_send()
            callee.answer(pending, arrived)

        self._threads.submit(answer)
        return pending

    def answer(self, pending: PendingReply, frame: Frame) -> None:
        """Serve a peer's request in this thread, and complete its call."""
        assert self._serve is not None
        self._serving.begin()
        try:
            pending.serve(self._serve, frame)
        finally:
            self._serving.end()

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        return self._replies.expect(call_id, peer)

    def send_reply(self, request: Frame, reply: Frame) -> None:
        member = self._find(request.src)
        caller = None if member is None else self._hub.transports.get(member.address)
        if caller is not None:
            caller.on_reply(request.call_id, copied(reply))

    def on_reply(self, call_id: int, reply: Frame) -> None:
        """Take a reply that a peer sent by ``send_reply``."""
        self._replies.on_reply(call_id, reply)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        with self._lock:
            pending = list(self._pending.pop(peer.token, ()))
        for call in pending:
            call.complete(Error(error))
        self._replies.fail(error, token=peer.token)

    def flush_replies(self, timeout: float) -> None:
        self._serving.wait_for_others(timeout)

    def close(self) -> None:
        self._hub.transports.pop(self._address, None)
        self._replies.fail(CallError("RPC was shut down on this worker"))
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
            decisions = group.join(member)
            hub.decisions.update((decision.token, decision) for decision in decisions)
            hub.changed.notify_all()
            hub.changed.wait_for(lambda: member.token in hub.decisions, timeout)
            decision = hub.decisions.pop(member.token, None)
            if decision is None:
                missing = group.missing(member.token)
                self._remove(member.token, "left")
                raise GroupError(
                    f"RPC worker {member.name!r} waited {timeout:g} s for group {self._key!r} to "
                    f"be complete: of world_size {member.world_size}, ranks {missing} are missing."
                )
            if isinstance(decision, Refused):
                raise GroupError(decision.reason)
            self._token = member.token
            self._wait_applied(decision.snapshot.version)
            return decision.snapshot

    def follow(
        self,
        version: int,
        apply: Callable[[list[Change]], None],
        on_expelled: Callable[[str], None],
    ) -> None:
        hub = self._hub

        def changes_after(version: int) -> list[Change] | None:
            with hub.changed:
                hub.applied[self._token] = version
                hub.changed.notify_all()
                while not self._closed and (session := self._session()) is not None:
                    if session.version > version:
                        result = session.since(version)
                        return result
                    hub.changed.wait()
                hub.applied.pop(self._token, None)
                hub.changed.notify_all()
                return None

        def run() -> None:
            applied = version
            while (changes := changes_after(applied)) is not None:
                apply(changes)
                applied = changes[-1].version

        with hub.changed:
            hub.applied[self._token] = version
        threading.Thread(target=run, name="rayrpc-directory", daemon=True).start()

    def members(self) -> list[Member]:
        with self._hub.changed:
            session = self._session()
            result = list(session.members.values()) if session is not None else []
        return result

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
            result = session.reached(tag) or {}
        return result

    def leave(self) -> None:
        self._end("left")

    def die(self, cause: str) -> None:
        """Remove this worker as one that died; the others apply that before this returns."""
        self._end("died", cause)

    def close(self) -> None:
        with self._hub.changed:
            self._closed = True
            self._hub.applied.pop(self._token, None)
            self._hub.changed.notify_all()

    # -- inside; the hub's lock is held (_end takes it) ---------------------------------------

    def _session(self) -> Session | None:
        group = self._hub.groups.get(self._key)
        return group.find(self._token) if group is not None else None

    def _end(self, kind: str, cause: str = "") -> None:
        with self._hub.changed:
            session = self._session()
            if session is not None:
                self._remove(self._token, kind, cause)
                self._wait_applied(session.version, session)

    def _remove(self, token: str, kind: str, cause: str = "") -> None:
        self._hub.groups[self._key].remove(token, kind, cause)
        self._hub.changed.notify_all()

    def _wait_applied(self, version: int, session: Session | None = None) -> None:
        """Wait until every other follower in the session has applied ``version``."""
        hub = self._hub
        session = session or self._session()
        assert session is not None

        def all_applied() -> bool:
            return all(
                hub.applied.get(token, version) >= version
                for token in session.members
                if token != self._token
            )

        hub.changed.wait_for(all_applied, APPLY_SECONDS)
