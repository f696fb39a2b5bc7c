"""The table of a world: which process holds a value or a service, and who is at a barrier.

It is in the process of the lowest rank when the world is made, and is lost with that process.  An
entry belongs to a member of the RPC group, by its token: if the process leaves, or dies and joins
again under the same name, its entries count for nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

from torch.futures import Future

from rayrpc._protocol.membership import Member
from rayrpc._runtime import current
from rayrpc.errors import RpcError
from rayrpc.functions import async_execution

__all__ = [
    "Holder",
    "add",
    "choose_owner",
    "enter_barrier",
    "find",
    "leave_barrier",
    "owner",
    "release_owner",
    "remove",
    "this_process",
]


class Holder(NamedTuple):
    """A process, for as long as it is a member: its name, and the token of its membership."""

    name: str
    token: str


class _Table:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[Hashable, Holder] = {}
        # by barrier: the processes at it, and the Futures that their calls wait for
        self.barriers: dict[Hashable, dict[Holder, Any]] = {}


_table = _Table()
_owner: Member | None = None


def choose_owner() -> str:
    """Fix which process has the table, until ``release_owner``; return its name."""
    global _owner
    _owner = current.get_agent().members.all()[0]
    return _owner.name


def release_owner() -> None:
    """Forget which process has the table."""
    global _owner
    _owner = None


def owner() -> str:
    """Return the name of the process that has the table.

    Raises:
        WorkerDiedError: it has died.
    """
    agent = current.get_agent()
    if _owner is None:  # for a group that was sent to a process without a world
        return agent.members.all()[0].name
    error = agent.members.death_of(_owner)
    if error is not None:
        raise error
    return _owner.name


def this_process() -> Holder:
    """Return this process as a holder."""
    member = current.get_agent().member
    return Holder(member.name, member.token)


# -- in the process that has the table ------------------------------------------------------------


def _is_member(holder: Holder) -> bool:
    agent = current.get_agent()
    with contextlib.suppress(RpcError):
        agent.lookup(holder.name)  # a new member's announcement may not have arrived yet
    return any(member.token == holder.token for member in agent.members.all())


def add(key: Hashable, holder: Holder) -> bool:
    """Add an entry; return False if another process has the key."""
    with _table.lock:
        found = _table.entries.get(key)
        if found is not None and _is_member(found):
            return False
        _table.entries[key] = holder
        return True


def remove(key: Hashable, holder: Holder) -> bool:
    """Remove an entry; return False if the holder does not have the key."""
    with _table.lock:
        if _table.entries.get(key) != holder:
            return False
        del _table.entries[key]
        return True


def find(key: Hashable) -> str | None:
    """Return the name of the process that has a key; None: no process has."""
    with _table.lock:
        found = _table.entries.get(key)
        if found is not None and not _is_member(found):
            found = None
            del _table.entries[key]
        return None if found is None else found.name


@async_execution
def enter_barrier(barrier: Hashable, holder: Holder, members: tuple[str, ...]) -> Any:
    """Return a Future that completes when all members have entered a barrier."""
    future: Any = Future()
    with _table.lock:
        entered = _table.barriers.setdefault(barrier, {})
        stale = [each for each in entered if each.name == holder.name or not _is_member(each)]
        to_complete = [entered.pop(each) for each in stale]
        entered[holder] = future
        if {each.name for each in entered} == set(members):
            to_complete += entered.values()
            del _table.barriers[barrier]
    for each in to_complete:
        each.set_result(None)
    return future


def leave_barrier(barrier: Hashable, holder: Holder) -> None:
    """Remove a process from a barrier that is not complete."""
    with _table.lock:
        future = _table.barriers.get(barrier, {}).pop(holder, None)
    if future is not None:
        future.set_result(None)
