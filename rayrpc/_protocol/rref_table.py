"""The RRef protocol as a pure state machine: events in, messages and effects out, no I/O.

It is torch's published protocol (https://docs.pytorch.org/docs/main/rpc/rref.html).  The owner
keeps the value as long as it counts a fork.  The states of a user's fork:

    PENDING ──(the owner counts it)──> CONFIRMED ──(no handle, no pending child)──> deleted

A parent keeps its own fork until the owner counts the child's, so that the count never falls to
zero while a worker holds the RRef or is about to receive it:

    A (user) shares with C (user):   A ──call with fork f──> C
                                     C ──ForkRequest f──> owner ──ForkAck f──> C
                                     C ──ChildAccept f──> A
    A (user) sends to the owner:     A ──call with fork f──> owner ──ChildAccept f──> A
    the owner shares with C:         it counts f before it sends the call; C's fork is CONFIRMED
    A drops its handle:              A ──UserDelete──> owner

An RRef in a call to its owner needs no fork if the caller's own fork is CONFIRMED: the caller
lends it, by its identity alone, and keeps its fork until the reply arrives.

A fork, a ForkRequest or a fetch may overtake the ``remote`` call that creates the RRef: the owner
then keeps an empty cell for it, which that call fills.

Messages may be delayed, duplicated, reordered or lost.  Each carries a sequence number of its
link.  The receiver applies every number once and acknowledges, on every frame back, the number
below which all have arrived; the sender retransmits those that are not acknowledged in time.  When
a worker leaves or dies, its forks and the messages to it are dropped.  What it has sent may still
arrive; so an owner remembers the RRefs that it has released, and does not create them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import (
    ChildAccept,
    Control,
    Fork,
    ForkAck,
    ForkRequest,
    UserDelete,
)
from rayrpc._protocol.rref_entries import Confirmed, Effect, Owned, Released, Used, UserState
from rayrpc._protocol.rref_link import Links
from rayrpc.errors import CallError

__all__ = ["RRefTable"]

_T = TypeVar("_T")

# How many deletions that have overtaken their creations a worker remembers.
MAX_CANCELLED = 1000
# How many RRefs that it owned and released a worker remembers.
MAX_RELEASED = 10_000


class RRefTable(Links):
    """Hold one worker's state of the RRef protocol.

    Not thread-safe, unless a method says so.

    Args:
        me (int): id of this worker.
        new_id (Callable): returns a new identity for a fork.
        new_cell (Callable): returns an empty cell for a new RRef.
    """

    def __init__(
        self,
        me: int,
        new_id: Callable[[], GloballyUniqueId],
        new_cell: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.me = me
        self._new_id = new_id
        self._new_cell = new_cell
        self.owned: dict[GloballyUniqueId, Owned] = {}
        self.used: dict[GloballyUniqueId, Used] = {}
        # forks that the owner does not count yet: child -> (its parent fork here, its worker)
        self._children: dict[GloballyUniqueId, tuple[GloballyUniqueId, int | None]] = {}
        # first forks that were deleted before the ``remote`` calls that create them arrived: these
        # were interrupted, and may never come
        self._cancelled: dict[GloballyUniqueId, None] = {}
        # owned RRefs that were released: workers that were lost may have sent messages for them;
        # plain tuples, which the garbage collector need not visit
        self._released: dict[tuple[int, int], None] = {}

    # -- events of this process -------------------------------------------------------------

    def own(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, holder: int) -> Any:
        """Add an owned RRef: a ``remote`` call of ``holder``, which has the first fork, arrived.

        Returns:
            The cell that the call must fill.
        """
        owned = self.owned.get(rref_id)
        if fork_id in self._cancelled:
            del self._cancelled[fork_id]
            self._end_creation(rref_id)
            return self._new_cell() if owned is None else owned.cell
        if holder in self._lost:  # the call arrived after the loss of its caller was known
            return self._new_cell() if owned is None else owned.cell
        if owned is None:
            owned = self.owned[rref_id] = Owned(self._new_cell(), {})
        owned.forks[fork_id] = holder
        owned.awaits_creation = False
        return owned.cell

    def lookup(self, rref_id: GloballyUniqueId) -> Any:
        """Return the cell of an owned RRef, an empty one if its ``remote`` call has not arrived.

        Raises:
            CallError: this worker has released the RRef, or its creator was lost.
        """
        owned = self.owned.get(rref_id)
        if owned is None:
            creator = rref_id.created_on
            if creator in self._lost or creator == self.me or rref_id in self._released:
                raise CallError(
                    f"RRef {rref_id} was released by its owner: the worker that created it, or "
                    "the workers that held it, are gone. Make the value again."
                )
            owned = self.owned[rref_id] = Owned(self._new_cell(), {}, awaits_creation=True)
        return owned.cell

    def use(
        self,
        rref_id: GloballyUniqueId,
        fork_id: GloballyUniqueId,
        owner: int,
        made: object = None,
    ) -> None:
        """Add a used RRef, whose ``remote`` call this worker sends to ``owner``."""
        if owner not in self._lost:
            self.used[fork_id] = Used(rref_id, owner, None, made=made)

    def created(self, fork_id: GloballyUniqueId) -> list[Effect]:
        """Confirm the first fork of a used RRef: the owner replied to the ``remote`` call."""
        return self._confirm(fork_id) if fork_id in self.used else []

    def share(
        self, fork_id: GloballyUniqueId, to: int | None, into: list[Fork] | None = None
    ) -> Fork:
        """Fork a used RRef for worker ``to``.

        Args:
            fork_id: this worker's fork.
            to: id of the worker; None: it is not known.
            into: takes the fork before it is counted: an interrupt may come then.

        Raises:
            KeyError: the fork was deleted.
        """
        entry = self.used[fork_id]
        child = self._new_id()
        fork = Fork(entry.rref_id, child, entry.owner, self.me)
        if into is not None:
            into.append(fork)
        if to not in self._lost:
            self._children[child] = (fork_id, to)
            entry.children.add(child)
        return fork

    def share_owned(
        self,
        rref_id: GloballyUniqueId,
        cell: Any,
        to: int | None,
        into: list[Fork] | None = None,
    ) -> Fork:
        """Fork an owned RRef for worker ``to``; the fork is counted at once."""
        child = self._new_id()
        fork = Fork(rref_id, child, self.me, self.me)
        if into is not None:
            into.append(fork)
        if to not in self._lost:
            owned = self.owned.get(rref_id)
            if owned is None:
                owned = self.owned[rref_id] = Owned(cell, {})
            owned.forks[child] = to
        return fork

    def unshare(self, fork: Fork) -> list[Effect]:
        """Undo ``share`` or ``share_owned``: the fork was not sent."""
        if fork.owner == self.me:
            return self._remove_fork(fork.rref_id, fork.fork_id)
        self._on_child_accepted(fork.fork_id)
        return []

    def receive(self, fork: Fork) -> tuple[Any, list[Effect]]:
        """Receive a fork that was in a payload.

        Returns:
            The cell of an RRef that this worker owns, else None; and the effects.  The fork of a
            used RRef is held from now on under ``fork.fork_id``, unless its owner is lost.

        Raises:
            CallError: this worker owned the RRef, but has released it, as a worker was lost.
        """
        if fork.owner == self.me:
            if fork.parent == self.me:
                cell = self.lookup(fork.rref_id)
                return cell, self._remove_fork(fork.rref_id, fork.fork_id)
            self._enqueue(fork.parent, ChildAccept, fork.fork_id)
            return self.lookup(fork.rref_id), []
        if fork.owner in self._lost:
            return None, []
        if (known := self.used.get(fork.fork_id)) is not None:  # an interrupt came meanwhile
            known.held = True
            return None, []
        entry = self.used[fork.fork_id] = Used(fork.rref_id, fork.owner, fork.parent)
        if fork.parent == fork.owner:
            entry.state = UserState.CONFIRMED
        else:
            self._enqueue(fork.owner, ForkRequest, fork.rref_id, fork.fork_id)
        return None, []

    def drop(self, fork_id: GloballyUniqueId) -> None:
        """Release a fork: its handle in this process was collected."""
        entry = self.used.get(fork_id)
        if entry is not None:
            entry.held = False
            self._delete_if_unused(fork_id, entry)

    def cancel(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> list[Effect]:
        """Delete an RRef whose ``remote`` call was interrupted; it may have been sent."""
        entry = self.used.get(fork_id)
        if entry is not None:
            entry.held = False
            return self._confirm(fork_id)
        if rref_id in self.owned:
            _remember(self._cancelled, fork_id, MAX_CANCELLED)
        return self._remove_fork(rref_id, fork_id)

    def release(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> list[Effect]:
        """Stop counting a fork of an owned RRef: a ``remote`` call to this worker itself ended."""
        return self._remove_fork(rref_id, fork_id)

    def drop_all(self) -> None:
        """Release every fork that this worker holds (shutdown)."""
        for fork_id in list(self.used):
            self.drop(fork_id)

    def on_peer_lost(self, worker: int) -> list[Effect]:
        """Drop the forks and messages of a worker that left or died."""
        effects: list[Effect] = []
        self._links.pop(worker, None)
        self._lost.add(worker)
        for rref_id, owned in list(self.owned.items()):
            if owned.awaits_creation and rref_id.created_on == worker:
                effects += self._end_creation(rref_id)
            for fork_id in [f for f, holder in owned.forks.items() if holder == worker]:
                effects += self._remove_fork(rref_id, fork_id)
        for fork_id in [f for f in self._cancelled if f.created_on == worker]:
            del self._cancelled[fork_id]
        for child in [c for c, (_, to) in self._children.items() if to == worker]:
            self._on_child_accepted(child)
        for fork_id in [f for f, entry in self.used.items() if entry.owner == worker]:
            for child in self.used.pop(fork_id).children:
                self._children.pop(child, None)
            effects.append(Confirmed(fork_id))
        return effects

    # -- messages ---------------------------------------------------------------------------

    def on_messages(self, sender: int, ack: int, messages: Iterable[Control]) -> list[Effect]:
        """Apply the acknowledgement and messages of a frame; duplicates change nothing.

        An interrupt may leave a message applied in part; call it again.

        Args:
            sender: id of the worker that sent the frame.
            ack: all messages to it with a lower number have arrived there; 0: none.
            messages: of the frame.
        """
        if sender in self._lost:
            return []
        link = self._link(sender)
        for seq in [seq for seq in link.in_flight if seq < ack]:
            del link.in_flight[seq]
        effects: list[Effect] = []
        for message in messages:
            if not link.is_new(message.seq):
                continue
            if isinstance(message, ForkRequest):
                with contextlib.suppress(CallError):
                    self.lookup(message.rref_id)
                    self.owned[message.rref_id].forks[message.fork_id] = sender
                self._enqueue(sender, ForkAck, message.fork_id)
            elif isinstance(message, ForkAck):
                effects += self._confirm(message.fork_id)
            elif isinstance(message, ChildAccept):
                self._on_child_accepted(message.fork_id)
            else:
                effects += self._delete(message.rref_id, message.fork_id, sender)
            link.note(message.seq)
        return effects

    # -- queries ----------------------------------------------------------------------------

    def is_counted(self, fork_id: GloballyUniqueId, by: int | None) -> bool:
        """Tell whether worker ``by`` owns the RRef of this fork and counts it; thread-safe."""
        entry = self.used.get(fork_id)
        return entry is not None and entry.owner == by and entry.state is UserState.CONFIRMED

    def is_confirmed(self, fork_id: GloballyUniqueId) -> bool:
        """Tell whether the owner counts this fork, as far as this worker knows."""
        entry = self.used.get(fork_id)
        return entry is None or entry.state is UserState.CONFIRMED

    def debug_info(self) -> dict[str, str]:
        """Return torch's counters (``_rref_context_get_debug_info``)."""
        counts = {
            "num_owner_rrefs": len(self.owned),
            "num_pending_futures": len(self._children),
            "num_pending_users": sum(e.state is UserState.PENDING for e in self.used.values()),
            "num_forks": sum(len(o.forks) for o in self.owned.values()),
        }
        return {key: str(count) for key, count in counts.items()}

    # -- inside -----------------------------------------------------------------------------

    def _confirm(self, fork_id: GloballyUniqueId) -> list[Effect]:
        entry = self.used.get(fork_id)
        if entry is not None:
            if entry.state is UserState.PENDING and entry.parent is not None:
                self._enqueue(entry.parent, ChildAccept, fork_id)
            entry.state = UserState.CONFIRMED
            self._delete_if_unused(fork_id, entry)
        return [Confirmed(fork_id)]

    def _on_child_accepted(self, child: GloballyUniqueId) -> None:
        fork_id, _ = self._children.get(child, (None, None))
        entry = self.used.get(fork_id) if fork_id is not None else None
        if fork_id is not None and entry is not None:
            entry.children.discard(child)
            self._delete_if_unused(fork_id, entry)
        self._children.pop(child, None)

    def _remove_fork(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> list[Effect]:
        owned = self.owned.get(rref_id)
        if owned is None:
            return []
        owned.forks.pop(fork_id, None)
        return self._release_if_unused(rref_id, owned)

    def _release_if_unused(self, rref_id: GloballyUniqueId, owned: Owned) -> list[Effect]:
        if owned.forks or owned.awaits_creation:
            return []
        del self.owned[rref_id]
        _remember(self._released, (rref_id.created_on, rref_id.local_id), MAX_RELEASED)
        return [Released(rref_id, owned.cell)]

    def _delete(
        self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, by: int
    ) -> list[Effect]:
        owned = self.owned.get(rref_id)
        is_unknown = owned is None or fork_id not in owned.forks
        if is_unknown and rref_id.created_on == fork_id.created_on == by:
            _remember(self._cancelled, fork_id, MAX_CANCELLED)
            return self._end_creation(rref_id)  # it may never arrive
        return self._remove_fork(rref_id, fork_id)

    def _end_creation(self, rref_id: GloballyUniqueId) -> list[Effect]:
        """Note that the ``remote`` call of an RRef comes no more."""
        owned = self.owned.get(rref_id)
        if owned is None or not owned.awaits_creation:
            return []
        owned.awaits_creation = False
        return self._release_if_unused(rref_id, owned)

    def _delete_if_unused(self, fork_id: GloballyUniqueId, entry: Used) -> None:
        if entry.held or entry.children or entry.state is UserState.PENDING:
            return
        self._enqueue(entry.owner, UserDelete, entry.rref_id, fork_id)
        del self.used[fork_id]


def _remember(into: dict[_T, None], what: _T, most: int) -> None:
    into[what] = None
    if len(into) > most:
        del into[next(iter(into))]
