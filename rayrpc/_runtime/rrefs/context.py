"""One worker's RRefs: the protocol's table with a lock, a voice and a memory for handles.

The table is pure; here its messages go out, its effects wake those who wait, and handles that
Python collects are reported to it.  Collection can happen anywhere, also inside this module's
own lock, so a handle's end is only noted in a queue, which one thread reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.ids import GloballyUniqueId, IdSource
from rayrpc._protocol.messages import Control, Fork
from rayrpc._protocol.rref_table import Confirmed, Effect, RRefTable
from rayrpc._runtime.rrefs.cell import Cell

__all__ = ["MakeRRef", "RRefContext"]

#: makes the handle of an RRef: (rref id, fork id or None for an owner, owner's id, cell or None)
MakeRRef = Callable[[GloballyUniqueId, GloballyUniqueId | None, int, Cell | None], Any]

# Deletions wait this long for company; whoever drops many sends few messages.
BATCH_SECONDS = 0.002
TURN_SECONDS = 1.0


class RRefContext:
    """Hold the RRefs of one worker while it is in a group.

    Args:
        me (int): id of this worker.
        ids (IdSource): makes identities.
        make_rref (Callable): makes handles.
        send_control (Callable): sends the messages that wait for a worker; must not block.
    """

    def __init__(
        self, me: int, ids: IdSource, make_rref: MakeRRef, send_control: Callable[[int], None]
    ) -> None:
        self._ids = ids
        self._make_rref = make_rref
        self._send_control = send_control
        self._table = RRefTable(me, ids.new, Cell)
        self._lock = threading.Lock()
        self._waiting: dict[GloballyUniqueId, list[threading.Event]] = {}
        self._dropped: queue.SimpleQueue[GloballyUniqueId | None] = queue.SimpleQueue()
        self._closed = False
        self._sweeper = threading.Thread(target=self._sweep, name="rayrpc-rrefs", daemon=True)
        self._sweeper.start()

    # -- making RRefs -----------------------------------------------------------------------

    def new_id(self) -> GloballyUniqueId:
        """Return an identity for an RRef that this worker owns."""
        return self._ids.new()

    def announce(self, owner: int) -> tuple[GloballyUniqueId, GloballyUniqueId, Any]:
        """Return the identities and the handle of an RRef that ``owner`` is about to make.

        If that is this worker, the handle is an owner's, which waits for the value.
        """
        rref_id, fork_id = self._ids.new(), self._ids.new()
        with self._lock:
            if owner == self._table.me:
                cell = self._table.own(rref_id, fork_id, owner)
                return rref_id, fork_id, self._make_rref(rref_id, None, owner, cell)
            self._table.use(rref_id, fork_id, owner)
        return rref_id, fork_id, self._make_rref(rref_id, fork_id, owner, None)

    def created(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> None:
        """Note that the owner made an announced RRef."""
        with self._lock:
            if fork_id in self._table.used:
                effects = self._table.created(fork_id)
            else:
                effects = self._table.release(rref_id, fork_id)
        self._settle(effects)

    def own(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, holder: int) -> Cell:
        """Return the cell to fill for a ``remote`` call of ``holder``."""
        with self._lock:
            return self._table.own(rref_id, fork_id, holder)  # type: ignore[no-any-return]

    def lookup(self, rref_id: GloballyUniqueId) -> Cell:
        """Return the cell of an owned RRef; KeyError if it is gone."""
        with self._lock:
            return self._table.lookup(rref_id)  # type: ignore[no-any-return]

    # -- sharing, for the codec ---------------------------------------------------------------

    def share(self, rref: Any, to: int | None) -> Fork:
        """Fork ``rref`` for worker ``to``.

        Raises:
            RuntimeError: it was deleted by ``shutdown``.
        """
        return rref._share(self, to)  # type: ignore[no-any-return]

    def share_used(self, fork_id: GloballyUniqueId, to: int | None) -> Fork:
        """Fork an RRef that this worker uses; KeyError if it was deleted."""
        with self._lock:
            return self._table.share(fork_id, to)

    def share_owned(self, rref_id: GloballyUniqueId, cell: Cell, to: int | None) -> Fork:
        """Fork an RRef that this worker owns."""
        with self._lock:
            return self._table.share_owned(rref_id, cell, to)

    def lend(self, rref: Any, to: int | None) -> GloballyUniqueId | None:
        """Return the identity of ``rref`` if ``to`` owns it and counts our fork, else None."""
        return rref._lend(self, to)  # type: ignore[no-any-return]

    def borrow(self, rref_id: GloballyUniqueId) -> Any:
        """Return the RRef of ours that another worker lent us."""
        return self._make_rref(rref_id, None, self._table.me, self.lookup(rref_id))

    def unshare(self, fork: Fork) -> None:
        """Take back a fork that was not sent."""
        with self._lock:
            effects = self._table.unshare(fork)
        self._settle(effects)

    def receive(self, fork: Fork) -> Any:
        """Return the RRef that a fork is a share of."""
        with self._lock:
            cell, effects = self._table.receive(fork)
        self._settle(effects)
        if fork.owner == self._table.me:
            return self._make_rref(fork.rref_id, None, fork.owner, cell)
        return self._make_rref(fork.rref_id, fork.fork_id, fork.owner, None)

    def discard(self, fork: Fork) -> None:
        """Take a fork that nobody wants, and let go of it."""
        self.receive(fork)

    # -- the life of a handle -----------------------------------------------------------------

    def drop(self, fork_id: GloballyUniqueId) -> None:
        """Note that a handle was collected; safe wherever Python collects."""
        self._dropped.put(fork_id)

    def is_held(self, fork_id: GloballyUniqueId) -> bool:
        """Tell whether the fork of a live handle was not deleted under it."""
        return fork_id in self._table.used

    def is_counted(self, fork_id: GloballyUniqueId, by: int | None) -> bool:
        """Tell whether a worker owns the RRef of this fork, and counts it."""
        return self._table.is_counted(fork_id, by)

    def is_confirmed(self, fork_id: GloballyUniqueId) -> bool:
        """Tell whether the owner is known to count a fork."""
        with self._lock:
            return self._table.is_confirmed(fork_id)

    def wait_confirmed(self, forks: Iterable[Fork], timeout: float | None) -> bool:
        """Wait until the owners count these received forks; tell whether they did in time."""
        end = None if timeout is None else time.monotonic() + timeout
        for fork in forks:
            with self._lock:
                if self._table.is_confirmed(fork.fork_id):
                    continue
                event = threading.Event()
                self._waiting.setdefault(fork.fork_id, []).append(event)
            release_reader()
            if not event.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
        return True

    # -- talking ------------------------------------------------------------------------------

    def take_pending(self, worker: int) -> tuple[int, tuple[Control, ...]]:
        """Return the ack and messages that the next frame to ``worker`` carries."""
        if self._table.is_silent(worker):
            return 0, ()
        with self._lock:
            return self._table.take(worker)

    def on_control(self, worker: int, ack: int, messages: tuple[Control, ...]) -> None:
        """Apply what a frame of ``worker`` carried."""
        if not messages and not ack:
            return
        with self._lock:
            effects = self._table.apply(worker, ack, messages)
        self._settle(effects)

    def flush(self, but: int | None = None) -> None:
        """Send all messages that wait, ``but`` those for a worker that a frame goes to anyway."""
        with self._lock:
            workers = [w for w in self._table.waiting() if w != but]
        for worker in workers:
            self._send_control(worker)

    def on_send_failed(self, worker: int) -> None:
        """Offer again what may not have reached ``worker``."""
        with self._lock:
            self._table.offer_again(worker)

    # -- members ------------------------------------------------------------------------------

    def on_peer_lost(self, worker: int) -> None:
        """Forget a worker that left or died."""
        with self._lock:
            effects = self._table.on_peer_lost(worker)
        self._settle(effects)
        self.flush()

    def on_peer_joined(self, worker: int) -> None:
        """Note that a worker has this id."""
        with self._lock:
            self._table.on_peer_joined(worker)

    # -- the end ------------------------------------------------------------------------------

    def delete_all(self, timeout: float) -> bool:
        """Drop all used RRefs, and wait until their owners know; tell whether they did in time."""
        end = time.monotonic() + timeout
        while True:
            with self._lock:
                self._table.drop_all()
                done = not self._table.used and self._table.is_settled()
            if done:
                return True
            if time.monotonic() > end:
                return False
            self.flush()
            time.sleep(0.005)

    def leaks(self) -> list[str]:
        """Return what is still alive: owned RRefs with forks elsewhere, and forks held here."""
        with self._lock:
            owned = [f"Leaking RRef {i} with {len(o.forks)} forks" for i, o in
                     self._table.owned.items()]  # fmt: skip
            used = [
                f"Leaking RRef {entry.rref_id} with fork Id {fork_id}"
                for fork_id, entry in self._table.used.items()
            ]
        return owned + used

    def debug_info(self) -> dict[str, str]:
        """Return torch's counters."""
        with self._lock:
            return self._table.debug_info()

    def close(self) -> None:
        """Forget everything; handles that are left are deleted ones from now on."""
        self._closed = True
        self._dropped.put(None)
        with self._lock:
            self._table.used.clear()
            self._table.owned.clear()

    # -- inside -------------------------------------------------------------------------------

    def _settle(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Confirmed):
                with self._lock:
                    events = self._waiting.pop(effect.fork_id, [])
                for event in events:
                    event.set()
        # a Released cell dies with its effect, here and not under the lock: its value may be
        # anything, also something whose end calls back into us

    def _sweep(self) -> None:
        turn = time.monotonic() + TURN_SECONDS
        while not self._closed:
            try:
                fork_id = self._dropped.get(timeout=TURN_SECONDS)
            except queue.Empty:
                fork_id = None
            forks = []
            if fork_id is not None:
                time.sleep(BATCH_SECONDS)
                forks.append(fork_id)
                while True:
                    try:
                        more = self._dropped.get_nowait()
                    except queue.Empty:
                        break
                    if more is not None:
                        forks.append(more)
            late = time.monotonic() > turn
            with self._lock:
                for fork_id in forks:
                    self._table.drop(fork_id)
                if late:
                    turn = time.monotonic() + TURN_SECONDS
                    self._table.offer_again()
            if (forks or late) and not self._closed:
                self.flush()
