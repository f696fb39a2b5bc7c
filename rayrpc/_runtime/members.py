"""The members of a group, as one worker knows them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Notifier
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.membership import Member
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["Members"]


class Joined(Protocol):
    """Called for each member that joins."""

    def __call__(self, member: Member, predecessor: Member | None) -> None:
        """Take a member that joined.

        Args:
            member: the member that joined.
            predecessor: a former member with its id whose leave was not reported yet; else None.
        """


class Members:
    """Keep the present and the former members of a group, and why the former ones are gone.

    Args:
        me (Member): this worker.
        members (Iterable[Member]): all members, this worker included.
        fetch (Callable): requests the members from the directory; used in dynamic groups, where
            the first call of a member may arrive before the report that it has joined.
        on_joined (Joined): called for each member that joins later.
        on_left (Callable): called for each that leaves, unless a successor has its id; only one of
            the two is called at a time.
    """

    def __init__(
        self,
        me: Member,
        members: Iterable[Member],
        fetch: Callable[[], list[Member]],
        on_joined: Joined,
        on_left: Callable[[Member], None],
    ) -> None:
        self.me = me
        self.my_info = WorkerInfo(me.name, me.id)
        members = list(members)
        #: whether the group was made with a ``world_size``; guests may join it, too
        self.is_static = any(member.world_size is not None for member in members)
        #: ids of the guests
        self.guests = {member.id for member in members if member.is_guest}
        self._fetch = fetch
        self._on_joined = on_joined
        self._on_left = on_left
        self._changed = Notifier()
        self._changes = threading.RLock()  # held by the thread that adds or removes a member
        #: by id: how often it was used before, as reported so far; never decreases
        self.epochs = {member.id: member.epoch for member in members}
        self._is_changing = False
        self._by_id = {member.id: member for member in members}
        self._by_name = {member.name: member for member in self._by_id.values()}
        self._deaths: dict[str, WorkerDiedError] = {}  # by token
        self._former: dict[str, Member] = {}  # the last one with a name
        self._replaced: dict[str, Member] = {}  # by a name in use: the last one that had it before
        #: tokens of members that have died, and in whose places others are started
        self.restarting: set[str] = set()

    def all(self) -> list[Member]:
        """Return all members, by id."""
        return sorted(self._by_id.values(), key=lambda member: member.id)

    def find(self, worker_id: int) -> Member | None:
        """Return the member with an id."""
        return self._by_id.get(worker_id)

    def info_of(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return the WorkerInfo of a destination, also of a member that is gone; see ``lookup``."""
        if to == self.me.id:
            return self.my_info
        member = self.lookup(to)
        return WorkerInfo(member.name, member.id)

    def name_of(self, worker_id: int) -> str:
        """Return the name of the member with an id, for messages."""
        member = self._by_id.get(worker_id)
        return f"id {worker_id}" if member is None else member.name

    def shares_main(self, worker_id: int) -> bool:
        """Tell whether a member's ``__main__`` is the same program as this worker's."""
        member = self._by_id.get(worker_id)
        return member is not None and member.main == self.me.main

    def lookup(self, to: str | int | WorkerInfo) -> Member:
        """Return the member that a destination names, also one that is gone.

        Raises:
            RuntimeError: there is, and was, no such worker.
            ValueError: ``to`` is no destination.
        """
        if isinstance(to, str):
            found = self._by_name.get(to)
        elif isinstance(to, WorkerInfo):
            found = self._by_id.get(to.id)
            if found is not None and found.name != to.name:
                found = None
            if found is None and to.name not in self._former:
                found = self._by_name.get(to.name)  # made by the program: torch uses its name
        elif isinstance(to, int):
            found = self._by_id.get(to)
        else:
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        return self._lookup_former_or_new(to) if found is None else found

    def _lookup_former_or_new(self, to: str | int | WorkerInfo) -> Member:
        def matches(member: Member) -> bool:
            if isinstance(to, WorkerInfo):
                return member.id == to.id and member.name == to.name
            return to in (member.name, member.id)

        for member in list(self._former.values()):
            if matches(member) and member.name not in self._by_name:
                return member
        if not self.is_static or self._may_be_guest(to):
            release_reader()
            for member in self._fetch():
                if matches(member):
                    self.add(member)
                    return member
        names = ", ".join(sorted(m.name for m in self.all() if not m.is_guest))
        wanted = to.name if isinstance(to, WorkerInfo) else to
        raise RpcError(f"could not find destination {wanted}: this group has the workers {names}.")

    def _may_be_guest(self, to: str | int | WorkerInfo) -> bool:
        """Tell whether a destination is an id that no rank of a static group has."""
        worker_id = to.id if isinstance(to, WorkerInfo) else to
        return isinstance(worker_id, int) and worker_id >= (self.me.world_size or 0)

    def death_of(self, member: Member) -> WorkerDiedError | None:
        """Return why a member is gone, if it is, in an error that may be raised; see ``fresh``."""
        error = self._deaths.get(member.token)
        return None if error is None else fresh(error)

    def death_of_owner(self, info: WorkerInfo) -> WorkerDiedError | None:
        """Return why the owner of an RRef is gone, if it is; another member may have its name."""
        former = self._former.get(info.name)
        if former is not None:
            return self.death_of(former)
        former = self._replaced.get(info.name)
        error = None if former is None else self.death_of(former)
        if error is None:
            return None
        cause = (
            f"{error.cause}. It has joined again since, without the values that it had: make the "
            "RRef anew"
        )
        return WorkerDiedError(error.worker, cause, error.node)

    def wait_for_restart(self, member: Member, timeout: float) -> None:
        """Wait until there is a member in the place of one that has died.

        Args:
            member: the one that has died.
            timeout: in seconds.
        """
        self.wait_until(lambda: member.token not in self.restarting, timeout)

    def is_present(self, worker_id: int, epoch: int) -> bool:
        """Tell whether no later member has the id of the one that has sent a frame.

        Args:
            worker_id: of the sender.
            epoch: how often its id was used before.
        """
        known = self.epochs.get(worker_id, -1)
        if known < epoch:  # it has joined, and that was not reported yet
            release_reader()
            for member in self._fetch():
                if member.id == worker_id:
                    self.add(member)
            known = self.epochs.get(worker_id, -1)
        return known <= epoch

    # -- changes ------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Add a member that joined, unless it is known to be gone.

        ``on_joined`` is called first: other threads may call the member as soon as they find it.
        """
        with self._change() as is_within_another:
            holder = self._by_id.get(member.id)
            is_known = holder is not None and holder.token == member.token
            if is_known or is_within_another or member.token in self._deaths:
                return
            self._on_joined(member, holder)
            self._by_id[member.id] = member
            self._by_name[member.name] = member
            (self.guests.add if member.is_guest else self.guests.discard)(member.id)
            former = self._former.pop(member.name, None)
            if former is not None:
                self._replaced[member.name] = former
                self.restarting.discard(former.token)
            self.epochs[member.id] = max(member.epoch, self.epochs.get(member.id, 0))

    def remove(self, member: Member, error: WorkerDiedError, is_restarted: bool = False) -> None:
        """Remove a member that left or died.

        Args:
            member: the member that is gone.
            error: the error that says why.
            is_restarted: another one is started in its place.
        """
        with self._change():
            self._deaths[member.token] = error
            if self._by_name.get(member.name, member) != member:  # another one has joined already
                self._replaced[member.name] = member
            else:
                self._former[member.name] = member
                if is_restarted:
                    self.restarting.add(member.token)
            if self._by_id.get(member.id) == member:
                del self._by_id[member.id]
            if self._by_name.get(member.name) == member:
                del self._by_name[member.name]
            if member.id not in self._by_id:
                self._on_left(member)

    @contextlib.contextmanager
    def _change(self) -> Iterator[bool]:
        """Hold the lock for changes of the members.

        Yields:
            True if this thread holds it already: a finalizer interrupts a change.
        """
        with self._changes:
            outer, self._is_changing = self._is_changing, True
            try:
                yield outer
            finally:
                self._is_changing = outer
                self._changed.notify_all()

    def notify(self) -> None:
        """Have ``wait_until`` check its condition."""
        self._changed.notify_all()

    def wait_until(self, ready: Callable[[], object], timeout: float | None) -> bool:
        """Wait until ``ready()``; it is checked whenever ``notify`` is called.

        Args:
            ready: the condition.
            timeout: in seconds; None: none.

        Returns:
            False if it did not become true in time.
        """
        if ready():
            return True
        release_reader()
        return bool(self._changed.wait_until(ready, timeout))
