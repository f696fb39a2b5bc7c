"""The RRef protocol as a pure state machine: events in, messages and effects out, no I/O.

It is torch's published protocol (https://docs.pytorch.org/docs/main/rpc/rref.html).  The owner
keeps the value as long as it counts a fork.  A user's fork goes through

    PENDING ──(owner counts it)──> CONFIRMED ──(handle dropped, no pending child)──> gone

and a parent keeps its own fork until the child's is counted, so that the count never falls to
zero while somebody still holds, or is about to hold, the RRef:

    A (user) shares with C (user):   A ──call with fork f──> C
                                     C ──ForkRequest f──> owner ──ForkAck f──> C
                                     C ──ChildAccept f──> A
    A (user) sends to the owner:     A ──call with fork f──> owner ──ChildAccept f──> A
    the owner shares with C:         it counts f before the call leaves; C's fork starts CONFIRMED
    A drops its handle:              A ──UserDelete──> owner

In a call to the owner, an RRef whose fork is CONFIRMED needs no other: it is lent, by its identity
alone, and the caller keeps its fork until the call is answered.

A share, a request to count or a fetch may overtake the ``remote`` call that makes the RRef: the
owner then keeps an empty cell for it, which that call fills.

Messages may arrive late, twice, in another order or not at all.  Each carries a number of its
link; a receiver applies every number once, and every frame that goes back tells up to which
number all have arrived; what is not covered in time is offered again.  A worker that is gone
loses its forks, and what was on its way to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import (
    ChildAccept,
    Control,
    Fork,
    ForkAck,
    ForkRequest,
    UserDelete,
)

__all__ = [
    "Confirmed",
    "Effect",
    "RRefTable",
    "Released",
    "UserState",
]


class UserState(Enum):
    """What a user knows about one of its forks."""

    PENDING = "pending"
    CONFIRMED = "confirmed"


class Confirmed(NamedTuple):
    """Effect: the owner counts this fork of ours."""

    fork_id: GloballyUniqueId


class Released(NamedTuple):
    """Effect: nobody else holds this RRef of ours any more."""

    rref_id: GloballyUniqueId
    cell: Any


Effect = Confirmed | Released


@dataclass(slots=True)
class _Owned:
    cell: Any
    forks: dict[GloballyUniqueId, int | None]  # fork -> worker that holds it
    expected: bool = False  # the remote call that makes it is yet to come


@dataclass(slots=True)
class _Used:
    rref_id: GloballyUniqueId
    owner: int
    parent: int | None
    state: UserState = UserState.PENDING
    held: bool = True  # a handle is alive in this process
    children: set[GloballyUniqueId] = field(default_factory=set)


class _Link:
    """Numbered messages to and from one worker."""

    __slots__ = ("beyond", "in_flight", "next_seq", "overdue", "queue", "told", "upto")

    def __init__(self) -> None:
        self.next_seq = 0
        self.queue: list[Control] = []
        self.in_flight: dict[int, Control] = {}
        self.overdue = 0  # what is in flight below it was so a turn ago
        self.upto = 0  # every number below was received
        self.told = 0  # ... which the other worker was told, up to here
        self.beyond: set[int] = set()  # received ahead of it

    def first_time(self, seq: int) -> bool:
        if seq < self.upto or seq in self.beyond:
            self.told = 0  # it does not know
            return False
        self.beyond.add(seq)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1
        return True


class RRefTable:
    """Hold one worker's share of the RRef protocol.

    Not thread-safe: its user serializes the calls.

    Args:
        me (int): id of this worker.
        new_id (Callable): makes identities for forks.
        new_cell (Callable): makes the cell of an RRef whose ``remote`` call is yet to come.
    """

    def __init__(
        self,
        me: int,
        new_id: Callable[[], GloballyUniqueId],
        new_cell: Callable[[], Any],
    ) -> None:
        self.me = me
        self._new_id = new_id
        self._new_cell = new_cell
        self._gone: set[int] = set()
        self.owned: dict[GloballyUniqueId, _Owned] = {}
        self.used: dict[GloballyUniqueId, _Used] = {}
        # forks on their way: child -> (our fork that it came from, worker it goes to)
        self._children: dict[GloballyUniqueId, tuple[GloballyUniqueId, int | None]] = {}
        self._links: dict[int, _Link] = {}

    # -- events of this process -------------------------------------------------------------

    def own(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, holder: int) -> Any:
        """Start to own an RRef whose first fork ``holder`` has (a ``remote`` call came in).

        Returns:
            The cell that the call must fill.
        """
        owned = self.owned.get(rref_id)
        if holder in self._gone:  # its call came after the news
            return self._new_cell() if owned is None else owned.cell
        if owned is None:
            owned = self.owned[rref_id] = _Owned(self._new_cell(), {})
        owned.forks[fork_id] = holder
        owned.expected = False
        return owned.cell

    def lookup(self, rref_id: GloballyUniqueId) -> Any:
        """Return the cell of an owned RRef, also of one whose ``remote`` call is on its way.

        Raises:
            KeyError: the RRef was made by a worker that is gone, and went with it.
        """
        owned = self.owned.get(rref_id)
        if owned is None:
            if rref_id.created_on in self._gone or rref_id.created_on == self.me:
                raise KeyError(rref_id)
            owned = self.owned[rref_id] = _Owned(self._new_cell(), {}, expected=True)
        return owned.cell

    def use(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId, owner: int) -> None:
        """Start to use an RRef that this worker asks ``owner`` to make."""
        if owner not in self._gone:
            self.used[fork_id] = _Used(rref_id, owner, None)

    def created(self, fork_id: GloballyUniqueId) -> list[Effect]:
        """Note that the owner made the RRef that ``use`` announced."""
        return self._confirm(fork_id)

    def share(self, fork_id: GloballyUniqueId, to: int | None) -> Fork:
        """Fork a used RRef for worker ``to``.

        Raises:
            KeyError: the fork was deleted.
        """
        entry = self.used[fork_id]
        child = self._new_id()
        if to not in self._gone:
            entry.children.add(child)
            self._children[child] = (fork_id, to)
        return Fork(entry.rref_id, child, entry.owner, self.me)

    def share_owned(self, rref_id: GloballyUniqueId, cell: Any, to: int | None) -> Fork:
        """Fork an owned RRef for worker ``to``; it is counted at once."""
        child = self._new_id()
        if to not in self._gone:
            owned = self.owned.get(rref_id)
            if owned is None:
                owned = self.owned[rref_id] = _Owned(cell, {})
            owned.forks[child] = to
        return Fork(rref_id, child, self.me, self.me)

    def unshare(self, fork: Fork) -> list[Effect]:
        """Take back a fork that was never sent."""
        if fork.owner == self.me:
            return self._forget(fork.rref_id, fork.fork_id)
        self._accept(fork.fork_id)
        return []

    def receive(self, fork: Fork) -> tuple[Any, list[Effect]]:
        """Take a fork that a payload brought.

        Returns:
            The cell of an RRef that this worker owns, else None; and the effects.  For a used
            RRef the fork is held from now on under ``fork.fork_id``.

        Raises:
            KeyError: this worker owned the RRef, and it went with the worker that made it.
        """
        if fork.owner == self.me:
            if fork.parent == self.me:
                cell = self.lookup(fork.rref_id)
                return cell, self._forget(fork.rref_id, fork.fork_id)
            self._send(fork.parent, ChildAccept, fork.fork_id)
            return self.lookup(fork.rref_id), []
        if fork.owner in self._gone:
            return None, []  # as ``gone`` leaves it: not held
        entry = self.used[fork.fork_id] = _Used(fork.rref_id, fork.owner, fork.parent)
        if fork.parent == fork.owner:
            entry.state = UserState.CONFIRMED
        else:
            self._send(fork.owner, ForkRequest, fork.rref_id, fork.fork_id)
        return None, []

    def drop(self, fork_id: GloballyUniqueId) -> None:
        """Note that no handle of this fork is left in this process."""
        entry = self.used.get(fork_id)
        if entry is not None:
            entry.held = False
            self._collect(fork_id, entry)

    def release(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> list[Effect]:
        """Stop counting a fork of an owned RRef (a ``remote`` on oneself is done)."""
        return self._forget(rref_id, fork_id)

    def drop_all(self) -> None:
        """Drop every fork that this worker holds (shutdown)."""
        for fork_id in list(self.used):
            self.drop(fork_id)

    def on_peer_lost(self, worker: int) -> list[Effect]:
        """Forget what a worker held, owned and was sent: it left or died."""
        effects: list[Effect] = []
        self._links.pop(worker, None)
        self._gone.add(worker)
        for rref_id, owned in list(self.owned.items()):
            if owned.expected and rref_id.created_on == worker:
                owned.expected = False  # its remote call will not come any more
                if not owned.forks:
                    del self.owned[rref_id]
                    effects.append(Released(rref_id, owned.cell))
            for fork_id in [f for f, holder in owned.forks.items() if holder == worker]:
                effects += self._forget(rref_id, fork_id)
        for child in [c for c, (_, to) in self._children.items() if to == worker]:
            self._accept(child)
        for fork_id in [f for f, entry in self.used.items() if entry.owner == worker]:
            for child in self.used.pop(fork_id).children:
                self._children.pop(child, None)
            effects.append(Confirmed(fork_id))  # whoever waits for it must wake up
        return effects

    def on_peer_joined(self, worker: int) -> None:
        """Note that a worker (again) has this id."""
        self._gone.discard(worker)

    # -- links ------------------------------------------------------------------------------

    def apply(self, sender: int, ack: int, messages: Iterable[Control]) -> list[Effect]:
        """Apply what a frame of ``sender`` carried; messages seen before change nothing."""
        if sender in self._gone:
            return []
        link = self._link(sender)
        for seq in [seq for seq in link.in_flight if seq < ack]:
            del link.in_flight[seq]
        effects: list[Effect] = []
        for message in messages:
            if not link.first_time(message.seq):
                continue
            if isinstance(message, ForkRequest):
                with contextlib.suppress(KeyError):
                    self.lookup(message.rref_id)
                    self.owned[message.rref_id].forks[message.fork_id] = sender
                self._send(sender, ForkAck, message.fork_id)
            elif isinstance(message, ForkAck):
                effects += self._confirm(message.fork_id)
            elif isinstance(message, ChildAccept):
                self._accept(message.fork_id)
            else:
                effects += self._forget(message.rref_id, message.fork_id)
        return effects

    def is_silent(self, worker: int) -> bool:
        """Tell whether there is nothing to say to ``worker``; needs no lock."""
        link = self._links.get(worker)
        return link is None or (link.told == link.upto and not link.queue)

    def take(self, worker: int) -> tuple[int, tuple[Control, ...]]:
        """Return what the next frame to ``worker`` must carry: an ack (0: none), and messages."""
        link = self._links.get(worker)
        if link is None:
            return 0, ()
        ack = 0 if link.told == link.upto else link.upto
        link.told = link.upto
        if not link.queue:
            return ack, ()
        messages, link.queue = tuple(link.queue), []
        for message in messages:
            link.in_flight[message.seq] = message
        return ack, messages

    def waiting(self) -> list[int]:
        """Return the workers for which messages wait to be sent."""
        return [worker for worker, link in self._links.items() if link.queue]

    def offer_again(self, worker: int | None = None) -> None:
        """Queue again what is not acknowledged: for one worker, or what is overdue for all.

        Called in turns of fixed length; what was in flight at the previous turn is overdue.
        """
        for number, link in self._links.items():
            if worker is None:
                late = [m for seq, m in link.in_flight.items() if seq < link.overdue]
                link.overdue = link.next_seq
            elif number == worker:
                late = list(link.in_flight.values())
            else:
                continue
            for message in late:
                del link.in_flight[message.seq]
            link.queue += late

    def is_settled(self) -> bool:
        """Tell whether everything sent has been acknowledged, and nothing waits."""
        return not any(link.queue or link.in_flight for link in self._links.values())

    # -- looking ----------------------------------------------------------------------------

    def is_counted(self, fork_id: GloballyUniqueId, by: int | None) -> bool:
        """Tell whether worker ``by`` owns the RRef of this fork, and counts it; takes no lock."""
        entry = self.used.get(fork_id)
        return entry is not None and entry.owner == by and entry.state is UserState.CONFIRMED

    def is_confirmed(self, fork_id: GloballyUniqueId) -> bool:
        """Tell whether the owner is known to count this fork."""
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

    def _link(self, worker: int) -> _Link:
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = _Link()
        return link

    def _send(self, worker: int, message: type[Control], *ids: GloballyUniqueId) -> None:
        if worker in self._gone:
            return
        link = self._link(worker)
        link.queue.append(message(link.next_seq, *ids))
        link.next_seq += 1

    def _confirm(self, fork_id: GloballyUniqueId) -> list[Effect]:
        entry = self.used.get(fork_id)
        if entry is None or entry.state is UserState.CONFIRMED:
            return []
        entry.state = UserState.CONFIRMED
        if entry.parent is not None:
            self._send(entry.parent, ChildAccept, fork_id)
        self._collect(fork_id, entry)
        return [Confirmed(fork_id)]

    def _accept(self, child: GloballyUniqueId) -> None:
        fork_id, _ = self._children.pop(child, (None, None))
        entry = self.used.get(fork_id) if fork_id is not None else None
        if fork_id is not None and entry is not None:
            entry.children.discard(child)
            self._collect(fork_id, entry)

    def _forget(self, rref_id: GloballyUniqueId, fork_id: GloballyUniqueId) -> list[Effect]:
        owned = self.owned.get(rref_id)
        if owned is None:
            return []
        owned.forks.pop(fork_id, None)
        if owned.forks or owned.expected:
            return []
        del self.owned[rref_id]
        return [Released(rref_id, owned.cell)]

    def _collect(self, fork_id: GloballyUniqueId, entry: _Used) -> None:
        if entry.held or entry.children or entry.state is UserState.PENDING:
            return
        del self.used[fork_id]
        self._send(entry.owner, UserDelete, entry.rref_id, fork_id)
