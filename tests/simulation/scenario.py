"""Scenarios: random programs that are run under a scheduler, checked, and shrunk if they fail."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from simulation.scheduler import Failure, Scheduler, Strategy
from simulation.strategies import Replay, strategy_for

__all__ = ["Result", "Scenario", "run", "shrink", "some_of"]

P = TypeVar("P")
T = TypeVar("T")

# Smaller programs are tried with so many schedules each.
SCHEDULES = 40


class Scenario(Protocol[P]):
    """Random programs of one kind."""

    name: str

    def program(self, rng: random.Random) -> P:
        """Return a random program; its ``repr`` is shown."""

    def smaller(self, program: P) -> Iterator[P]:
        """Yield programs that do less."""

    def run(self, program: P, scheduler: Scheduler) -> None:
        """Run a program, in the main thread of a simulation; raise AssertionError if it fails."""


def some_of(rng: random.Random, kinds: Sequence[T]) -> list[T]:
    """Return some kinds of what a program may do, often only one or two.

    A defect that needs several operations of one kind is rare among programs that do everything.
    (Groce et al., "Swarm testing", 2012.)
    """
    return rng.sample(list(kinds), rng.choice([1, 1, 2, rng.randint(1, len(kinds))]))


@dataclass
class Result(Generic[P]):
    """A run.

    Args:
        program: what ran.
        scheduler: as it is after the run.
        failure: None if there was none.
    """

    program: P
    scheduler: Scheduler
    failure: Failure | None


def run(
    scenario: Scenario[Any],
    seed: int,
    program: Any = None,
    strategy: Strategy | None = None,
    lines: bool = False,
) -> Result[Any]:
    """Run a scenario once.

    Args:
        scenario: to run.
        seed: of the program, of the strategy, and of the threads' random choices.
        program: None: the seed's.
        strategy: None: the seed's.
        lines: threads may be switched at every line of the code that is simulated.
    """
    if program is None:
        program = scenario.program(random.Random(f"program {seed}"))
    scheduler = Scheduler(strategy or strategy_for(seed), seed, lines=lines)
    was_enabled = gc.isenabled()
    gc.disable()  # a collection comes at other steps in each process
    try:
        failures = scheduler.run(lambda: scenario.run(program, scheduler))
    finally:
        if was_enabled:
            gc.enable()
    return Result(program, scheduler, failures[0] if failures else None)


def shrink(
    scenario: Scenario[Any], seed: int, result: Result[Any], lines: bool = False
) -> Result[Any]:
    """Return a run that fails in the same way with less: calls, threads, and switches of threads.

    Args:
        scenario: what failed.
        seed: of the run.
        result: the run.
        lines: as it was run with.
    """
    assert result.failure is not None
    kind = _kind(result.failure)

    def fails(each: Result[Any]) -> bool:
        return each.failure is not None and _kind(each.failure) == kind

    def try_smaller() -> tuple[int, Result[Any]] | None:
        for program in scenario.smaller(result.program):
            for schedule in [seed, *range(SCHEDULES)]:
                tried = run(scenario, schedule, program, lines=lines)
                if fails(tried):
                    return schedule, tried
        return None

    while (found := try_smaller()) is not None:
        seed, result = found
    choices = result.scheduler.choices

    def replay(choices: list[Any]) -> Result[Any]:
        return run(scenario, seed, result.program, Replay(choices), lines)

    choices = _fewest(choices, lambda some: fails(replay(some)))
    replayed = replay(choices)
    return replayed if fails(replayed) else result


def _fewest(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """Return some of the items that still fail, of which none can be left out.

    (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.)
    """
    size = len(items)
    while size:
        start = 0
        while start < len(items):
            fewer = items[:start] + items[start + size :]
            if fails(fewer):
                items = fewer
            else:
                start += size
        size //= 2
    return items


def _kind(failure: Failure) -> str:
    """Return what equal defects have in common: the error, and where it came."""
    error, _, text = failure.summary.partition(":")
    return f"{error} {text.rpartition('(')[2]}"
