"""One worker: its membership, its transport, and the parts that make and serve calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.threads import Slots, ThreadCache
from rayrpc._protocol.ids import IdSource, WorkerInfo
from rayrpc._protocol.membership import Change, Member, Snapshot
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Directory, Pending, PendingReply, Transport, copied
from rayrpc._runtime.callee import Callee
from rayrpc._runtime.caller import Caller
from rayrpc._runtime.hooks import Hook
from rayrpc._runtime.rrefs.context import MakeRRef, RRefContext
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.devices import DeviceRoutes
from rayrpc.errors import GroupError, RpcError, WorkerDiedError

__all__ = ["Agent"]

logger = logging.getLogger(__name__)


class Agent:
    """Be one worker of a group, from ``init_rpc`` to ``shutdown``.

    ``torch.distributed.rpc.TensorPipeAgent`` is the name that programs know it by.

    Args:
        snapshot (Snapshot): what the directory admitted this worker with.
        transport (Transport): not started yet.
        directory (Directory): joined.
        key (str): names the group.
        options (Any): the backend options that ``init_rpc`` got.
        rref_maker (Callable): given this agent, returns what makes handles of RRefs.
        hooks (list[Hook]): concerns that accompany calls.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        transport: Transport,
        directory: Directory,
        key: str,
        options: Any,
        rref_maker: Callable[[Agent], MakeRRef],
        hooks: list[Hook],
    ) -> None:
        me = snapshot.me
        self.member = me
        self.key = key
        self.info = WorkerInfo(me.name, me.id)
        self.hooks = hooks
        self.rpc_timeout: float = options.rpc_timeout
        self._options = options
        self._transport = transport
        self._directory = directory
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._joins = 0
        self._at_end: list[Callable[[], None]] = []
        self._members = {m.id: m for m in snapshot.members}
        self._names = {m.name: m for m in snapshot.members}
        self._lost: dict[str, WorkerDiedError] = {}  # by token
        self._former: dict[str, Member] = {}  # by name
        self._threads = ThreadCache("rayrpc", soft_limit=options.num_worker_threads + 4)
        # one thread completes Futures, more only when a callback blocks
        self._replies = ThreadCache("rayrpc-reply", soft_limit=1)
        self._slots = Slots(options.num_worker_threads, self._threads)
        ids = IdSource(me.id, me.epoch)
        self.rrefs = RRefContext(me.id, ids, rref_maker(self), self._send_control)
        codec = Codec(self.rrefs)
        self._devices = DeviceRoutes(me.name, options.device_maps)
        for member in snapshot.members:
            self._devices.add(member)
        self.caller = Caller(
            self.info,
            snapshot.session,
            me.main,
            codec,
            self._devices,
            self.rrefs,
            self._replies,
            self._send,
            hooks,
        )
        self.callee = Callee(
            self.info,
            snapshot.session,
            codec,
            self._devices,
            self.rrefs,
            self._threads,
            self._slots,
            self._shares_main,
            self._name_of,
            lambda: self.default_timeout,
            hooks,
        )
        for hook in hooks:
            hook.attach(self)
        self._version = snapshot.version
        self._secret = snapshot.secret

    def start(self) -> None:
        """Serve calls, and follow the group, from now on."""
        self._transport.start(self.callee.serve, self.find, self._secret)
        self._directory.follow(self._version, self._apply)

    # -- who is there -------------------------------------------------------------------------

    @property
    def is_static_group(self) -> bool:
        """Tell whether the group was made with a ``world_size``."""
        return self.member.world_size is not None

    def find(self, worker_id: int) -> Member | None:
        """Return the member with an id."""
        return self._members.get(worker_id)

    def lookup(self, to: str | int | WorkerInfo) -> Member:
        """Return the member that a destination means, also one that is gone by now.

        Raises:
            RuntimeError: there is, and was, no such worker.
            ValueError: it is no destination.
        """
        if isinstance(to, str):
            found = self._names.get(to)
        elif isinstance(to, WorkerInfo):
            found = self._members.get(to.id)
            if found is not None and found.name != to.name:
                found = None
        elif isinstance(to, int) and not isinstance(to, bool):
            found = self._members.get(to)
        else:
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        if found is not None:
            return found
        return self._lookup_again(to)

    def _lookup_again(self, to: str | int | WorkerInfo) -> Member:
        def fits(member: Member) -> bool:
            if isinstance(to, WorkerInfo):
                return member.id == to.id and member.name == to.name
            return to in (member.name, member.id)

        for member in list(self._former.values()):
            if fits(member) and member.name not in self._names:
                return member
        if not self.is_static_group:
            # somebody may have joined whose news is still on its way
            for member in self._directory.members():
                if fits(member):
                    with self._lock:
                        self._add(member)
                    return member
        names = ", ".join(sorted(self._names))
        wanted = to.name if isinstance(to, WorkerInfo) else to
        raise RpcError(f"could not find destination {wanted}: this group has the workers {names}.")

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the WorkerInfo of this worker, or of one given by name or id."""
        if worker is None:
            return self.info
        member = self.lookup(worker)
        return WorkerInfo(member.name, member.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the WorkerInfo of all members, by id."""
        return [WorkerInfo(m.name, m.id) for m in self.members()]

    def members(self) -> list[Member]:
        """Return all members, by id."""
        return sorted(self._members.values(), key=lambda m: m.id)

    def death_of(self, member: Member) -> WorkerDiedError | None:
        """Return why a member is gone, if it is."""
        return self._lost.get(member.token)

    def death_of_owner(self, info: WorkerInfo) -> WorkerDiedError | None:
        """Return why a worker given by its WorkerInfo is gone, if it is."""
        former = self._former.get(info.name)
        return self._lost.get(former.token) if former is not None else None

    def info_of(self, worker_id: int) -> WorkerInfo:
        """Return the WorkerInfo for an id."""
        if worker_id == self.info.id:
            return self.info
        member = self.lookup(worker_id)
        return WorkerInfo(member.name, member.id)

    @property
    def default_timeout(self) -> float | None:
        """The timeout in seconds of calls that name none; None: they have none."""
        return self.rpc_timeout or None

    def resolve_timeout(self, timeout: float) -> float | None:
        """Return a call's timeout in seconds; None: it has none.

        Args:
            timeout: as the user gives it: -1 is the default, 0 is none.

        Raises:
            TypeError, ValueError: it is no number, or negative (-1 stands for the default).
        """
        if timeout == -1:
            return self.default_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
        if not timeout >= 0:
            raise ValueError(
                f"timeout must be 0 (none) or more seconds, got {timeout}; leave it out for the "
                "default"
            )
        return timeout or None

    def _name_of(self, worker_id: int) -> str:
        member = self._members.get(worker_id)
        return f"id {worker_id}" if member is None else member.name

    def _shares_main(self, worker_id: int) -> bool:
        member = self._members.get(worker_id)
        return member is not None and member.main == self.member.main

    def _add(self, member: Member) -> None:
        holder = self._members.get(member.id)
        if holder is not None and holder.token != member.token:
            self.rrefs.on_peer_lost(member.id)  # it left; the news of that is late
        self._members[member.id] = member
        self._names[member.name] = member
        self._former.pop(member.name, None)
        self._devices.add(member)
        self.rrefs.on_peer_joined(member.id)

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            member = change.member
            if change.kind == "joined":
                with self._lock:
                    if member.token not in self._lost:
                        self._add(member)
                continue
            cause = change.cause or "it has left the group"
            error = WorkerDiedError(member.name, cause, member.node)
            with self._lock:
                self._lost[member.token] = error
                self._former[member.name] = member
                if self._members.get(member.id) == member:
                    del self._members[member.id]
                if self._names.get(member.name) == member:
                    del self._names[member.name]
            if change.kind == "died":
                logger.info("%s", error)
            self._transport.on_peer_lost(member, error)
            self.caller.on_peer_lost(member, error)
            if self._members.get(member.id) is None:  # nobody else has its id by now
                self.rrefs.on_peer_lost(member.id)
                for hook in self.hooks:
                    hook.on_peer_lost(member.id, error)
        with self._changed:
            self._changed.notify_all()

    # -- sending ------------------------------------------------------------------------------

    def _send(self, peer: Member, frame: Frame) -> Pending:
        if peer.token == self.member.token:
            pending = PendingReply()
            arrived = copied(frame)
            self._threads.submit(lambda: pending.serve(self.callee.serve, arrived))
            return pending
        error = self._lost.get(peer.token)
        if error is not None:
            pending = PendingReply()
            pending.complete(Error(error))
            return pending
        return self._transport.call(peer, frame)

    def _send_control(self, worker_id: int) -> None:
        member = self._members.get(worker_id)
        if member is not None and not self._closed:
            self.caller.control(member)

    # -- the end ------------------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], object], timeout: float | None) -> bool:
        """Wait until ``ready()``, looking again whenever the membership changes."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not ready():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in a thread of this worker."""
        self._threads.submit(task)

    def notify(self) -> None:
        """Have ``wait_until`` check its condition."""
        with self._changed:
            self._changed.notify_all()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no member has calls under way, nor calls that those may cause.

        The members report how many calls they sent and served while idle; when two rounds in a
        row agree, none is on its way (Mattern's counting, without a coordinator of its own).

        Args:
            shutdown: accepted for torch's sake.
            timeout: in seconds, 0 for none.

        Raises:
            GroupError: some member did not come in time.
        """
        end = time.monotonic() + timeout if timeout else None
        last: dict[str, Any] | None = None
        round_number = 0
        while True:
            self.drain(timeout)
            left = None if end is None else max(0.1, end - time.monotonic())
            mine = (self.caller.sent, self.callee.served)
            tag = f"join-{self._joins}-{round_number}"
            reports = self._directory.sync(tag, mine, left)
            if reports == last:
                self._joins += 1
                return
            last = reports
            round_number += 1

    def drain(self, timeout: float = 0) -> None:
        """Wait until this worker makes and serves no calls.

        Args:
            timeout: in seconds, 0 for none.

        Raises:
            GroupError: it still does after that.
        """
        end = time.monotonic() + timeout if timeout else None
        while self.caller.active or self.callee.active:
            if end is not None and time.monotonic() > end:
                raise GroupError(
                    f"RPC worker {self.info.name!r} still has calls under way after {timeout} s: "
                    f"{self.caller.active} of its own, {self.callee.active} of others"
                )
            time.sleep(0.002)

    def sync(self) -> None:
        """Wait until every member is here."""
        self.join()

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when this worker shuts down, while it is still in the group."""
        self._at_end.append(callback)

    def shutdown(self) -> None:
        """Leave the group and stop; does not wait for others."""
        if self._closed:
            return
        for callback in self._at_end:
            callback()
        self._closed = True
        self._directory.close()
        self._directory.leave()
        self.caller.close()
        self.callee.close()
        self.rrefs.close()
        for hook in self.hooks:
            hook.close()
        self._transport.close()
        self._replies.close()
        self._threads.close()

    # -- looking ------------------------------------------------------------------------------

    def get_debug_info(self) -> dict[str, str]:
        """Return torch's counters of an agent."""
        counts = {
            "agent.num_pending_requests": self._slots.waiting,
            "agent.thread_pool_size": self._slots.limit,
            "agent.num_idle_threads": self._slots.free,
            "agent.client_active_calls": self.caller.active,
            "agent.server_active_calls": self.callee.active,
            "agent.server_active_async_calls": 0,
        }
        return {key: str(count) for key, count in counts.items()}

    def get_metrics(self) -> dict[str, str]:
        """Return counters as text; the same as ``get_debug_info``."""
        return self.get_debug_info()

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        maps: dict[str, dict[torch.device, torch.device]] = self._options.device_maps
        return maps.get(dst.name, {})

    def __repr__(self) -> str:
        names = ", ".join(info.name for info in self.get_worker_infos())
        return f"<rayrpc agent {self.info.name} of {names}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{m.id}</td><td>{m.name}</td><td>{m.node}</td><td>{m.pid}</td></tr>"
            for m in self.members()
        )
        head = "<tr><th>id</th><th>name</th><th>node</th><th>pid</th></tr>"
        return f"<table>{head}{rows}</table>"
