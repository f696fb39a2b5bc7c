"""Strategies: which thread goes on, by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from simulation.scheduler import Choice, Scheduler, SimulatedThread, Strategy

__all__ = ["Freezing", "Priorities", "RandomWalk", "Replay", "strategy_for"]

# How long a thread is frozen, in steps, and how far the clock may advance meanwhile.
FROZEN_STEPS = (10, 400)
FROZEN_SECONDS = 0.02


class RandomWalk(Strategy):
    """Choose at random; some threads less often than others.

    Args:
        rng (Random): decides.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._slow_chance = rng.choice([0.0, 0.5, 0.9])
        self._weights: dict[SimulatedThread, float] = {}

    def on_spawn(self, thread: SimulatedThread) -> None:
        is_slow = self._rng.random() < self._slow_chance
        self._weights[thread] = self._rng.random() ** 3 + 0.01 if is_slow else 1.0

    def choose(
        self, scheduler: Scheduler, threads: list[SimulatedThread]
    ) -> SimulatedThread | None:
        if len(threads) == 1:
            return threads[0]
        return self._rng.choices(threads, [self._weights[thread] for thread in threads])[0]


class Freezing(RandomWalk):
    """Choose at random, and freeze threads for a while, as a busy system does.

    The clock may advance while the threads that can run are frozen.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._chance = rng.choice([0.01, 0.03, 0.06])
        self._frozen_until: dict[SimulatedThread, int] = {}

    def choose(
        self, scheduler: Scheduler, threads: list[SimulatedThread]
    ) -> SimulatedThread | None:
        step, rng = scheduler.steps, self._rng
        if rng.random() < self._chance:
            self._frozen_until[scheduler.current] = step + rng.randint(*FROZEN_STEPS)
        awake = [thread for thread in threads if self._frozen_until.get(thread, 0) <= step]
        if awake:
            return super().choose(scheduler, awake)
        if rng.random() < 0.2 or not _may_pass(scheduler):
            return rng.choice(threads)
        return None


def _may_pass(scheduler: Scheduler) -> bool:
    """Tell whether the time may pass until the next deadline though threads can run."""
    due = scheduler.next_deadline()
    return due is not None and due <= scheduler.now + FROZEN_SECONDS


class Priorities(Strategy):
    """Run the thread of the highest priority; lower that of the running one at a few steps.

    A defect that needs d changes is found with a probability that has a lower bound.
    (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs",
    2010: PCT.)

    Args:
        rng (Random): decides.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        steps = rng.choice([20, 200, 2000, 20_000])  # how many a run has is not known
        self._priorities: dict[SimulatedThread, float] = {}
        self._changes = sorted(rng.randrange(steps) for _ in range(rng.randint(1, 5)))
        self._lowest = 0.0

    def on_spawn(self, thread: SimulatedThread) -> None:
        self._priorities[thread] = 1 + self._rng.random()

    def choose(
        self, scheduler: Scheduler, threads: list[SimulatedThread]
    ) -> SimulatedThread | None:
        while self._changes and scheduler.steps >= self._changes[0]:
            self._changes.pop(0)
            self._lowest -= 1
            self._priorities[scheduler.current] = self._lowest
        return max(threads, key=lambda thread: self._priorities[thread])


class Replay(Strategy):
    """Repeat recorded choices, and make the default one at all other steps.

    Args:
        choices (Sequence): those of a run, or some of them.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = dict(choices)

    def on_spawn(self, thread: SimulatedThread) -> None:
        pass

    def choose(
        self, scheduler: Scheduler, threads: list[SimulatedThread]
    ) -> SimulatedThread | None:
        key = self._choices.get(scheduler.steps)
        if key == "" and _may_pass(scheduler):
            return None
        for thread in threads:
            if thread.key == key:
                return thread
        return scheduler.current if scheduler.current in threads else threads[0]


def strategy_for(seed: int) -> Strategy:
    """Return a seed's strategy."""
    rng = random.Random(f"strategy {seed}")
    return (Freezing, RandomWalk, Freezing, Priorities)[seed % 4](rng)
