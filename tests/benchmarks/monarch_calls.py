"""Monarch's calls; importing this needs ``torchmonarch``.

Written after Monarch's documented API (docs/source/actors.md of meta-pytorch/monarch) and not run
where this was written: should it have changed, the column is left out, with Monarch's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carriers import function
from measures import Calls
from monarch.actor import Actor, endpoint, this_host

__all__ = ["Callee", "MonarchCalls", "start"]


class Callee(Actor):  # type: ignore[misc, unused-ignore]
    """Be the callee."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._count = 0

    @endpoint
    def run(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function."""
        return func(*args)

    @endpoint
    def keep(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run a function and keep its result."""
        self._kept = func(*args)

    @endpoint
    def kept(self) -> Any:
        """Send back what was kept."""
        return self._kept

    @endpoint
    def add(self, number: int) -> int:
        """Count."""
        self._count += number
        return self._count


def start() -> tuple[Any, Any]:
    """Return a mesh of one process, and a ``Callee`` in it."""
    procs = this_host().spawn_procs(per_host={"procs": 1})
    return procs, procs.spawn("callee", Callee)


class MonarchCalls(Calls):
    """Call a ``Callee``.

    Args:
        actor: what ``start`` returned.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def prepare(self, load: str) -> tuple[Any, ...]:
        return function(load)

    def sync(self, *prepared: Any) -> Any:
        return self._actor.run.call_one(*prepared).get()

    def start(self, *prepared: Any) -> Any:
        return self._actor.run.call_one(*prepared)

    def wait(self, started: list[Any]) -> None:
        for future in started:
            future.get()

    def keep_and_fetch(self, *prepared: Any) -> Any:
        kept = self._actor.keep.call_one(*prepared)  # messages arrive in order
        value = self._actor.kept.call_one().get()
        kept.get()
        return value

    def method(self) -> Callable[[], Any]:
        return lambda: self._actor.add.call_one(1).get()
