"""Where a world's values and services are: one table, on the process of the lowest rank.

That is settled when the world is made: if the process dies, the table does.  An entry belongs to a
process, and is gone with it: one whose process has left, or died and came again under the same
name, counts for nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

from torch.futures import Future

from rayrpc._protocol.membership import Member
from rayrpc._runtime import current
from rayrpc.errors import RpcError
from rayrpc.functions import async_execution

__all__ = ["Holder", "enter", "find", "here", "place", "put", "settle", "take", "withdraw"]


class Holder(NamedTuple):
    """A process, now: its name, and the token of its membership."""

    name: str
    token: str


class _Table:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[Any, Holder] = {}
        self.meetings: dict[Any, dict[Holder, Any]] = {}  # Futures by who has entered


_table = _Table()
_settled: Member | None = None


def settle(is_settled: bool = True) -> str:
    """Settle which process has the table, or no longer; return its name."""
    global _settled
    _settled = current.get_agent().members()[0] if is_settled else None
    return _settled.name if _settled is not None else ""


def place() -> str:
    """Return the name of the process that has the table.

    Raises:
        WorkerDiedError: it has died.
    """
    agent = current.get_agent()
    if _settled is None:  # a group that was sent to where no world is
        return agent.members()[0].name
    error = agent.death_of(_settled)
    if error is not None:
        raise error
    return _settled.name


def here() -> Holder:
    """Return this process."""
    member = current.get_agent().member
    return Holder(member.name, member.token)


def _is_there(holder: Holder) -> bool:
    agent = current.get_agent()
    with contextlib.suppress(RpcError):
        agent.lookup(holder.name)  # the news of who has just joined may be on its way
    return any(member.token == holder.token for member in agent.members())


def put(key: Any, holder: Holder) -> bool:
    """Enter a holder; return False if there is another."""
    with _table.lock:
        found = _table.entries.get(key)
        if found is not None and _is_there(found):
            return False
        _table.entries[key] = holder
        return True


def take(key: Any, holder: Holder) -> bool:
    """Take the entry of a holder out; return False if it has none."""
    with _table.lock:
        if _table.entries.get(key) != holder:
            return False
        del _table.entries[key]
        return True


def find(key: Any) -> str | None:
    """Return the name of a key's holder; None: it has none."""
    with _table.lock:
        found = _table.entries.get(key)
        if found is not None and not _is_there(found):
            found = None
            del _table.entries[key]
        return None if found is None else found.name


@async_execution
def enter(meeting: Any, holder: Holder, members: tuple[str, ...]) -> Any:
    """Return a Future that is done when all members have entered a meeting."""
    future: Any = Future()
    with _table.lock:
        there = _table.meetings.setdefault(meeting, {})
        gone = [each for each in there if each.name == holder.name or not _is_there(each)]
        done = [there.pop(each) for each in gone]
        there[holder] = future
        if {each.name for each in there} == set(members):
            done += there.values()
            del _table.meetings[meeting]
    for each in done:
        each.set_result(None)
    return future


def withdraw(meeting: Any, holder: Holder) -> None:
    """Take back that a process has entered a meeting, if that has not begun."""
    with _table.lock:
        future = _table.meetings.get(meeting, {}).pop(holder, None)
    if future is not None:
        future.set_result(None)
