"""Thread-safe ``RRefTable`` that sends its messages and tracks collected handles.

The table is pure.  The context guards it with a lock, sends its messages, wakes threads that wait
for its effects, and reports collected handles to it.  Python may collect a handle in any thread,
also in one that holds the context's lock; so a collected handle is only put into a queue
(``upkeep``), and so are forks that were not sent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Event
from rayrpc._protocol.ids import GloballyUniqueId, IdSource
from rayrpc._protocol.messages import Control, Fork
from rayrpc._protocol.rref_entries import Confirmed, Effect
from rayrpc._protocol.rref_table import RRefTable
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.rrefs.collected import CollectedHandles, HandleRef
from rayrpc._runtime.rrefs.handle_protocol import Handle, MakeHandle
from rayrpc._runtime.rrefs.listing import OwnedRRef, UsedRRef, leaks, listed
from rayrpc._runtime.rrefs.upkeep import Upkeep
from rayrpc.errors import CallError, RpcError

__all__ = ["RRefContext"]

logger = logging.getLogger(__name__)

DELETE_POLL_SECONDS = 0.005


class _Messages(NamedTuple):
    """The messages of a frame, to be applied again after an interrupt."""

    sender: int
    ack: int
    messages: tuple[Control, ...]


_Task = HandleRef | Fork | _Messages  # of ``Upkeep``


class RRefContext:
    """Hold the RRefs of one worker while it is in a group.

    Args:
        me (int): id of this worker.
        ids (IdSource): makes identities.
        make_handle (MakeHandle): makes handles.
        send_control (Callable): sends the pending messages for a worker; must not block.
        group (str): the group's key.
    """

    def __init__(
        self,
        me: int,
        ids: IdSource,
        make_handle: MakeHandle,
        send_control: Callable[[int], None],
        group: str = "",
    ) -> None:
        self.group = group
        self.new_id = ids.new  # for the RRefs and forks that this worker makes
        self._make_handle = make_handle
        self._send_control = send_control
        self._table = RRefTable(me, ids.new, Cell)
        self._lock = threading.Lock()
        self._unconfirmed: dict[GloballyUniqueId, list[Event]] = {}
        self._upkeep: Upkeep[_Task] = Upkeep(self._run_task, self._retransmit, self.flush)
        self._handles = CollectedHandles(self._upkeep.submit)
        # RRefs that were in use before their holders or owners left; see keep_leaks
        self._kept_leaks: dict[GloballyUniqueId, str] | None = None
        self._upkeep.start()

    # -- creation -----------------------------------------------------------------------------

    def announce(
        self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, owner: int, made: object
    ) -> Handle:
        """Return the handle of an RRef that ``owner`` will create; see ``cancel``.

        If this worker is the owner, the handle is an owner's, and its cell is empty.

        Args:
            rref_id, fork_id: new identities, of the RRef and of this worker's fork.
            owner: id of the owner.
            made: where the value was made; see ``made_text``.
        """
        with self._lock:
            if owner == self._table.me:
                cell = self._table.own(rref_id, fork_id, owner)
                cell.made = made
                result = self._make_handle(rref_id, None, owner, cell)
                return result
            self._table.use(rref_id, fork_id, owner, made)
        return self._make_handle(rref_id, fork_id, owner, None)

    def cancel(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> None:
        """Delete an announced RRef, of which no handle may be left, at its owner too."""
        with self._lock:
            effects = self._table.cancel(rref_id, fork_id)
        self._settle(effects)
        self.flush()

    def created(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> None:
        """Note that the owner has created an announced RRef."""
        with self._lock:
            if fork_id in self._table.used:
                effects = self._table.created(fork_id)
            else:
                effects = self._table.release(rref_id, fork_id)
        self._settle(effects)

    def own(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, holder: int) -> Cell:
        """Return the cell to fill for a ``remote`` call of ``holder``."""
        with self._lock:
            result = cast(Cell, self._table.own(rref_id, fork_id, holder))
        return result

    def lookup(self, rref_id: GloballyUniqueId) -> Cell:
        """Return the cell of an owned RRef; CallError if it was released."""
        with self._lock:
            result = cast(Cell, self._table.lookup(rref_id))
        return result

    # -- sharing, for the codec ---------------------------------------------------------------

    def share(self, rref: Handle, to: int | None, into: list[Fork]) -> None:
        """Fork ``rref`` for worker ``to``.

        Args:
            to: id of the worker; None: it is not known.
            into: takes the fork, also if an interrupt comes meanwhile.

        Raises:
            RuntimeError: it was deleted by ``shutdown``.
        """
        rref._share(self, to, into)

    def share_used(
        self, fork_id: GloballyUniqueId, to: int | None, into: list[Fork] | None
    ) -> Fork:
        """Fork an RRef that this worker uses; KeyError if it was deleted."""
        with self._lock:
            result = self._table.share(fork_id, to, into)
        return result

    def share_owned(
        self, rref_id: GloballyUniqueId, cell: Cell, to: int | None, into: list[Fork] | None
    ) -> Fork:
        """Fork an RRef that this worker owns."""
        with self._lock:
            result = self._table.share_owned(rref_id, cell, to, into)
        return result

    def lend(self, rref: Handle, to: int | None) -> GloballyUniqueId | None:
        """Return the identity of ``rref`` if ``to`` owns it and counts our fork, else None."""
        return rref._lend(self, to)

    def borrow(self, rref_id: GloballyUniqueId) -> Handle:
        """Return a handle of an owned RRef that another worker lent to this one."""
        return self._make_handle(rref_id, None, self._table.me, self.lookup(rref_id))

    def unshare(self, fork: Fork) -> None:
        """Undo a fork that was not sent."""
        with self._lock:
            effects = self._table.unshare(fork)
        self._settle(effects)

    def receive(self, fork: Fork) -> Handle:
        """Return the handle for a received fork."""
        with self._lock:
            cell, effects = self._table.receive(fork)
        self._settle(effects)
        if fork.owner == self._table.me:
            return self._make_handle(fork.rref_id, None, fork.owner, cell)
        return self._make_handle(fork.rref_id, fork.fork_id, fork.owner, None)

    def discard(self, fork: Fork) -> None:
        """Receive a fork, again if an interrupt came meanwhile, and release it at once."""
        with contextlib.suppress(CallError):  # this worker owns it, and has received it before
            self.receive(fork)

    # -- handles ------------------------------------------------------------------------------

    def watch(self, handle: object, fork_id: GloballyUniqueId) -> None:
        """Delete a fork once Python collects its handle, in whatever thread."""
        self._handles.watch(handle, fork_id)

    def release_later(self, fork: Fork) -> None:
        """Undo a fork that was not sent; safe in any thread that collects."""
        self._upkeep.submit(fork)

    def is_held(self, fork_id: GloballyUniqueId) -> bool:
        """Tell whether this worker holds a fork, which ``shutdown`` may have deleted."""
        return fork_id in self._table.used

    def is_counted(self, fork_id: GloballyUniqueId, by: int | None) -> bool:
        """Tell whether a worker owns the RRef of this fork, and counts it."""
        return self._table.is_counted(fork_id, by)

    def is_confirmed(self, fork_id: GloballyUniqueId) -> bool:
        """Return whether the owner has confirmed that it counts a fork."""
        with self._lock:
            result = self._table.is_confirmed(fork_id)
        return result

    def wait_confirmed(self, forks: Iterable[Fork], timeout: float | None) -> bool:
        """Wait until the owners count these received forks.

        Args:
            forks: received with a call.
            timeout: for all of them, in seconds; None: none.

        Returns:
            False if an owner did not confirm in time.
        """
        deadline = Deadline(timeout)
        for fork in forks:
            with self._lock:
                if self._table.is_confirmed(fork.fork_id):
                    continue
                event = Event()
                self._unconfirmed.setdefault(fork.fork_id, []).append(event)
            release_reader()
            if not event.wait(deadline.remaining()):
                return False
        return True

    # -- messages -----------------------------------------------------------------------------

    def take_pending(self, worker: int) -> tuple[int, tuple[Control, ...]]:
        """Return the acknowledgement and the messages for the next frame to ``worker``."""
        if self._table.has_nothing_pending(worker):
            return 0, ()
        with self._lock:
            result = self._table.take_pending(worker)
        return result

    def on_control(self, worker: int, ack: int, messages: tuple[Control, ...]) -> None:
        """Apply the acknowledgement and the messages of a frame from ``worker``."""
        if not messages and not ack:
            return
        try:
            with self._lock:
                effects = self._table.on_messages(worker, ack, messages)
            self._settle(effects)
        except BaseException:  # an interrupt, which strikes no other thread
            self._upkeep.submit(_Messages(worker, ack, messages))
            raise

    def flush(self, but: int | None = None) -> None:
        """Send all pending messages.

        Args:
            but: the worker that a frame is sent to anyway.
        """
        with self._lock:
            workers = [w for w in self._table.pending_workers() if w != but]
        for worker in workers:
            self._send_control(worker)

    def on_send_failed(self, worker: int) -> None:
        """Make the messages that may not have reached ``worker`` pending again."""
        with self._lock:
            self._table.retransmit(worker)

    # -- members ------------------------------------------------------------------------------

    def on_peer_joined(self, worker: int) -> None:
        """Note that a worker has this id."""
        with self._lock:
            self._table.on_peer_joined(worker)

    def on_peer_lost(self, worker: int) -> None:
        """Release the forks of a worker that left or died."""
        with self._lock:
            before = {} if self._kept_leaks is None else leaks(self._table)
            effects = self._table.on_peer_lost(worker)
            if self._kept_leaks is not None:
                after = leaks(self._table)
                self._kept_leaks |= {k: leak for k, leak in before.items() if k not in after}
        self._settle(effects)
        self.flush()

    # -- shutdown -----------------------------------------------------------------------------

    def delete_all(self, timeout: float) -> bool:
        """Delete all used RRefs, and wait for the owners' acknowledgements.

        Args:
            timeout: in seconds.

        Returns:
            False if an owner did not acknowledge in time.
        """
        deadline = Deadline(timeout)
        while True:
            with self._lock:
                self._table.drop_all()
                done = not self._table.used and self._table.is_settled()
            if done:
                return True
            release_reader()
            if deadline.expired:
                logger.warning(
                    "owners of RRefs did not acknowledge their deletion in %s s, and keep the "
                    "values",
                    timeout,
                )
                return False
            self.flush()
            time.sleep(DELETE_POLL_SECONDS)

    def keep_leaks(self) -> None:
        """Have ``check_leaks`` report also RRefs that a worker releases by leaving from now on.

        Workers pass the last barrier of ``shutdown`` together, and leave in any order.
        """
        with self._lock:
            self._kept_leaks = {}

    def check_leaks(self) -> None:
        """Raise if RRefs are alive: owned ones with forks, or forks held here.

        Raises:
            RuntimeError: with the list of them.
        """
        with self._lock:
            found = {**(self._kept_leaks or {}), **leaks(self._table)}
        if found:
            raise RpcError(
                "\n".join(found.values())
                + "\nLeaking RRefs: delete all references to RRefs, on all workers, before "
                "shutdown, or set torch.distributed.rpc.api._ignore_rref_leak to True."
            )

    def counts(self) -> tuple[int, int]:
        """Return how many RRefs this worker owns, and how many forks it holds."""
        return len(self._table.owned), len(self._table.used)

    def listed(self) -> tuple[list[OwnedRRef], list[UsedRRef]]:
        """Return the RRefs that this worker owns, and those that it uses."""
        with self._lock:
            result = listed(self._table)
        return result

    def debug_info(self) -> dict[str, str]:
        """Return torch's counters."""
        with self._lock:
            result = self._table.debug_info()
        return result

    def close(self) -> None:
        """Drop all RRefs; handles that are alive count as deleted from now on."""
        self._upkeep.close()
        with self._lock:
            self._table.used.clear()
            self._table.owned.clear()

    # -- effects and deletions ----------------------------------------------------------------

    def _settle(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Confirmed):
                with self._lock:
                    for event in self._unconfirmed.get(effect.fork_id, ()):
                        event.set()
                    self._unconfirmed.pop(effect.fork_id, None)
        # A released cell is collected with its effect, here and not under the lock: its value
        # may be any object, also one whose finalizer calls this context.

    def _run_task(self, task: _Task) -> None:
        effects: list[Effect] = []
        with self._lock:
            if isinstance(task, Fork):
                effects = self._table.unshare(task)
            elif isinstance(task, _Messages):
                effects = self._table.on_messages(*task)
            else:
                self._handles.forget(task)
                self._table.drop(task.fork_id)
        self._settle(effects)

    def _retransmit(self) -> None:
        with self._lock:
            self._table.retransmit()
