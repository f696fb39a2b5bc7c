"""Run small models of threads in every order that few preemptions allow.

A model's thread is a generator: it yields after each atomic step, and yields a function to wait
until that returns True. A run always goes on with the same thread where that can run; going to
another is a preemption, and ``explore`` tries all runs with at most so many of them. (Musuvathi
and Qadeer, "Iterative context bounding for systematic testing of multithreaded programs", 2007.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

__all__ = ["Deadlock", "Model", "Thread", "explore"]

MAX_RUNS = 200_000

Thread = Generator[Any, None, None]  # yields None, or the function that it waits for


class Deadlock(AssertionError):
    """Threads wait for what no thread will do."""


class Model(Protocol):
    """Threads, and what they share; each run has one of its own."""

    threads: list[Thread]  # may grow during a run

    def may_wait(self, thread: Thread) -> bool:
        """Tell whether a thread may still wait at the end."""

    def check(self) -> None:
        """Check the state at the end of a run."""


def explore(make: Callable[[], Model], preemptions: int = 2) -> int:
    """Run a model in all orders with at most so many preemptions; return how many there were."""
    todo: list[tuple[int, ...]] = [()]
    runs = 0
    while todo:
        prefix = todo.pop()
        runs += 1
        assert runs <= MAX_RUNS, "the model is too large"
        todo += _run(make(), prefix, preemptions)
    return runs


def _run(model: Model, prefix: tuple[int, ...], preemptions: int) -> list[tuple[int, ...]]:
    """Run a model once; return the prefixes of the other runs that branch off behind its own."""
    waits: dict[Thread, Callable[[], bool] | None] = {}
    ended: set[Thread] = set()
    others: list[tuple[int, ...]] = []
    made: list[int] = []
    last: Thread | None = None
    while True:
        ready = [
            thread
            for thread in model.threads
            if thread not in ended and ((wait := waits.get(thread)) is None or wait())
        ]
        if not ready:
            break
        if last in ready:  # going on with it is choice 0
            ready.remove(last)
            ready.insert(0, last)
        position = len(made)
        may_choose = len(ready) > 1 and (last is not ready[0] or preemptions > 0)
        choice = prefix[position] if position < len(prefix) else 0
        if may_choose and position >= len(prefix):
            others += [(*made, other) for other in range(1, len(ready))]
        if choice and last is ready[0]:
            preemptions -= 1
        made.append(choice)
        last = ready[choice]
        waits.pop(last, None)
        try:
            wait = next(last)
        except StopIteration:
            ended.add(last)
        else:
            if wait is not None:
                waits[last] = wait
    stuck = [thread for thread in model.threads if thread not in ended]
    if not all(map(model.may_wait, stuck)):
        raise Deadlock(f"after the choices {made}")
    model.check()
    return others
