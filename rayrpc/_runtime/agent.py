"""Wires the parts of one worker together."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

import torch

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.threads import Slots, ThreadCache
from rayrpc._protocol.ids import IdSource, WorkerInfo
from rayrpc._protocol.membership import Change, Member, Snapshot
from rayrpc._protocol.transport import Directory, Transport
from rayrpc._runtime.callee import Callee
from rayrpc._runtime.caller import Caller
from rayrpc._runtime.cancelling import Cancelling
from rayrpc._runtime.gil_waits import GilWaits
from rayrpc._runtime.hooks import Hook
from rayrpc._runtime.inspection import Inspection
from rayrpc._runtime.members import Members
from rayrpc._runtime.noted_waits import NotedWaits
from rayrpc._runtime.objects import NoStore, ObjectStore
from rayrpc._runtime.observers import Observers
from rayrpc._runtime.quiescence import Quiescence
from rayrpc._runtime.router import Router
from rayrpc._runtime.rrefs.context import RRefContext
from rayrpc._runtime.rrefs.handle_protocol import Handle
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.devices import DeviceRoutes
from rayrpc._runtime.timeouts import resolve_timeout
from rayrpc._runtime.user_api import UserApi
from rayrpc._runtime.worker import Worker
from rayrpc.errors import WorkerDiedError
from rayrpc.options import TensorPipeRpcBackendOptions

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.002
# How long a worker that leaves waits until the calls that it serves are replied to.
REPLY_SECONDS = 2.0
# How long a call waits for a worker that is started again.
RESTART_SECONDS = 60.0


class Agent:
    """Run one worker of a group, from ``init_rpc`` to ``shutdown``: connect its parts.

    Programs import it as ``torch.distributed.rpc.TensorPipeAgent``.

    Args:
        snapshot (Snapshot): the group's state when the directory admitted this worker.
        transport (Transport): the transport of its frames; not started yet.
        directory (Directory): the group's directory, which this worker has joined.
        key (str): the group's key.
        options (TensorPipeRpcBackendOptions): the backend options of ``init_rpc``.
        make_handle (Callable): takes this agent, and what ``MakeHandle`` does; makes RRef handles.
        user_api (UserApi): the functions that RRefs call.
        objects (ObjectStore, optional): the cluster's object store.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        transport: Transport,
        directory: Directory,
        key: str,
        options: TensorPipeRpcBackendOptions,
        make_handle: Callable[..., Handle],
        user_api: UserApi,
        objects: ObjectStore | None = None,
    ) -> None:
        me = snapshot.me
        self.member = me
        self.key = key
        self.user_api = user_api
        self.objects = objects or NoStore()
        self._options = options
        #: carries its frames
        self.transport = transport
        self._directory = directory
        self._snapshot = snapshot
        self._leaving = threading.Lock()  # acquired once, and never released
        self._closed = False
        self._gil_waits: GilWaits | None = None
        self._on_shutdown: list[Callable[[], None]] = []
        self._threads = ThreadCache("rayrpc", soft_limit=options.num_worker_threads + 4)
        # one thread completes Futures, more only when a callback blocks
        self._replies = ThreadCache("rayrpc-reply", soft_limit=1)
        self.slots = Slots(options.num_worker_threads, self._threads)
        #: the hooks that take part in calls; the first ones are added before ``start``
        self.hooks: list[Hook] = []
        self.waits = NotedWaits()
        #: called when members join and leave
        self.observers = Observers(self._threads.submit)
        #: of the group, as this worker knows them
        self.members = Members(
            me, snapshot.members, directory.members, self._on_joined, self._on_left
        )
        self.info = self.members.my_info
        ids = IdSource(me.id, me.epoch)
        make = functools.partial(make_handle, self)
        self.rrefs = RRefContext(me.id, ids, make, self._send_control, key)
        self._worker = Worker(
            self.info,
            snapshot.session,
            self.members,
            Codec(self.rrefs),
            DeviceRoutes(me.name, options.device_maps),
            self.rrefs,
            self.hooks,
            options.rpc_timeout or None,
            self.objects,
        )
        for member in snapshot.members:
            self._worker.devices.add(member)
        self._router = Router(self.members, transport, self._threads.submit)
        send = self._router.send
        self.caller = Caller(self._worker, self._replies, send, transport.on_interrupted_call)
        self.inspection = Inspection(self._worker, self.caller.new_id, send)
        self.cancelling = Cancelling(self.caller, self._threads.submit, transport.kill)
        self.callee = Callee(self._worker, self.slots, self.cancelling)
        self._quiescence = Quiescence(self._worker, self.caller, self.callee, directory)

    def start(self) -> None:
        """Serve calls, and follow the directory, from now on."""
        logger.debug("%s has joined group %s, with id %d", self.info.name, self.key, self.info.id)
        self._threads.start()
        self.caller.start_threads()
        for change in self._snapshot.restarting:
            self.members.remove(change.member, _death(change), is_restarted=True)
        self._router.start(self.callee.serve)
        self.transport.start(self.callee.serve, self.members.find, self._snapshot.secret)
        self._directory.follow(self._snapshot.version, self._apply, self._on_expelled)

    # -- timeouts -----------------------------------------------------------------------------

    @property
    def default_timeout(self) -> float | None:
        """The default timeout of calls in seconds; None: none."""
        return self._worker.default_timeout

    @default_timeout.setter
    def default_timeout(self, seconds: float | None) -> None:
        self._worker.default_timeout = seconds

    def resolve_timeout(self, timeout: float) -> float | None:
        """Return the timeout in seconds of a call that a user makes; see ``resolve_timeout``."""
        return resolve_timeout(timeout, self._worker.default_timeout)

    # -- members ------------------------------------------------------------------------------

    def lookup(self, to: str | int | WorkerInfo, timeout: float | None = None) -> Member:
        """Return the member that a destination names; see ``Members.lookup``.

        Args:
            to: the destination.
            timeout: of a call, as the user gives it: how long to wait, a minute at most, for a
                worker that has died and is started again. None: do not wait.
        """
        member = self.members.lookup(to)
        if member.token in self.members.restarting and timeout is not None:
            seconds = self.resolve_timeout(timeout)
            self.members.wait_for_restart(
                member, RESTART_SECONDS if seconds is None else min(seconds, RESTART_SECONDS)
            )
            member = self.members.lookup(to)
        return member

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the WorkerInfo of this worker, or of one given by name or id.

        Raises:
            RuntimeError: the group has no such worker.
        """
        if worker is None:
            return self.info
        if not isinstance(worker, (str, int, WorkerInfo)):
            raise TypeError(
                "incompatible function arguments: a worker is given by its name or id, not by "
                f"{worker!r}"
            )
        return self.members.info_of(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the WorkerInfo of all members that are no guests, by id."""
        return [WorkerInfo(each.name, each.id) for each in self.members.all() if not each.is_guest]

    def _on_joined(self, member: Member, predecessor: Member | None) -> None:
        if predecessor is not None:  # it left, and the directory reports that later
            self.rrefs.on_peer_lost(member.id)
        self._worker.devices.add(member)
        self.rrefs.on_peer_joined(member.id)
        logger.debug("%s: %s has joined on %s", self.info.name, member.name, member.node)
        self.observers.report(Change(0, "joined", member))

    def _on_left(self, member: Member) -> None:
        self.rrefs.on_peer_lost(member.id)

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind == "joined":
                self.members.add(change.member)
            else:
                self._on_peer_lost(change)
        self.members.notify()

    def _on_expelled(self, reason: str) -> None:
        """Treat all other members as dead: the group has declared this one lost."""
        me = self.member
        logger.error(
            "RPC worker %r is no member of its group any more: %s. Its calls fail; restart it.",
            me.name,
            reason,
        )
        cause = f"the group has declared {me.name!r}, this worker, lost: {reason}"
        for member in self.members.all():
            if member.token != me.token:
                self._on_peer_lost(Change(0, "died", member, cause))

    def _on_peer_lost(self, change: Change) -> None:
        member = change.member
        error = _death(change)
        has_died = change.kind == "died"
        self.members.remove(member, error, has_died and member.is_restarted)
        self.observers.report(change._replace(cause=error.cause))
        if has_died:
            logger.info("%s", error)
        else:
            logger.debug("%s: %s has left", self.info.name, member.name)
        self.transport.on_peer_lost(member, error)
        self.caller.on_peer_lost(member, error)
        if self.members.find(member.id) is None:  # no successor has its id
            for hook in self.hooks:
                hook.on_peer_lost(member.id, error)

    # -- sending ------------------------------------------------------------------------------

    def _send_control(self, worker_id: int) -> None:
        member = self.members.find(worker_id)
        if member is not None and not self._closed:
            self.caller.send_control(member)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in a thread of this worker."""
        self._threads.submit(task)

    # -- shutdown -----------------------------------------------------------------------------

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no member has calls under way; see ``Quiescence.join``.

        Args:
            shutdown: this worker is to leave: end its streams.
            timeout: in seconds; 0: none.
        """
        self._quiescence.join(timeout or None, shutdown)

    def drain(self, timeout: float = 0) -> None:
        """Wait until this worker makes and serves no calls; see ``Quiescence.drain``.

        Args:
            timeout: in seconds; 0: none.
        """
        self._quiescence.drain(timeout or None)

    def sync(self) -> None:
        """Wait until every member calls this."""
        self.join()

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when this worker shuts down, while it is still in the group."""
        self._on_shutdown.append(callback)

    @property
    def has_left(self) -> bool:
        """Whether this worker has left its group, or is leaving."""
        return self._leaving.locked()

    def shutdown(self) -> None:
        """Leave the group and stop; do not wait for other members.  Another call does nothing."""
        if not self._leaving.acquire(blocking=False):
            return
        for callback in self._on_shutdown:
            callback()
        self._closed = True
        self._flush_replies()
        self._directory.close()
        self._directory.leave()
        self.caller.close()
        self.callee.close()
        self.objects.close()
        self.rrefs.close()
        for hook in self.hooks:
            hook.close()
        self.transport.close()
        self._replies.close()
        self._threads.close()

    def _flush_replies(self) -> None:
        """Wait until running functions are replied to, for ``REPLY_SECONDS`` at most.

        Members fail their calls to this worker when the directory reports that it has left.
        """
        deadline = Deadline(REPLY_SECONDS)
        while self.slots.free < self.slots.limit and not deadline.expired:
            time.sleep(DRAIN_POLL_SECONDS)
        self.transport.flush_replies(deadline.within(REPLY_SECONDS))

    # -- inspection ---------------------------------------------------------------------------

    def sent_bytes(self) -> dict[str, int]:
        """Return the number of bytes sent so far, by kind of transport."""
        return self.transport.sent_bytes()

    def get_debug_info(self) -> dict[str, str]:
        """Return torch's counters of an agent."""
        counts = {
            "agent.num_pending_requests": self.slots.waiting,
            "agent.thread_pool_size": self.slots.limit,
            "agent.num_idle_threads": self.slots.free,
            "agent.client_active_calls": self.caller.active,
            "agent.server_active_calls": self.callee.active,
            "agent.server_active_async_calls": 0,
        }
        info = {key: str(count) for key, count in counts.items()}
        if self._gil_waits is not None:
            info["agent.gil_average_wait_time_us"] = str(self._gil_waits.average_us)
        return info

    def _enable_gil_profiling(self, flag: bool) -> None:
        around = self.callee.around
        if self._gil_waits is not None:
            around.remove(self._gil_waits.measured)
            self._gil_waits = None
        if flag:
            self._gil_waits = GilWaits()
            around.append(self._gil_waits.measured)

    def get_metrics(self) -> dict[str, str]:
        """Return counters as text; the same as ``get_debug_info``."""
        return self.get_debug_info()

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
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
            for m in self.members.all()
        )
        head = "<tr><th>id</th><th>name</th><th>node</th><th>pid</th></tr>"
        return f"<table>{head}{rows}</table>"


def _death(change: Change) -> WorkerDiedError:
    member = change.member
    return WorkerDiedError(member.name, change.cause or "it has left the group", member.node)
