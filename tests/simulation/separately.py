"""Run a scenario, or a test, in a fork of a process that runs nothing else.

While the code is simulated, all threads of this process that run it are, too: those that other
tests have left idle would take part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.fork_server import output_of
from simulation.mutation import Mutation, mutated
from simulation.replacing import simulated
from simulation.scenario import Scenario, run
from simulation.scenarios import SCENARIOS
from simulation.scheduler import Scheduler

__all__ = ["first_failure", "in_gate", "in_virtual_time"]

SECONDS = 900.0


def first_failure(name: str, seeds: range, mutation: Mutation | None = None) -> str:
    """Return how the first seed fails that does; empty if none does.

    Args:
        name: of the scenario.
        seeds: to run, in order.
        mutation: of the code that runs.
    """
    fault = None if mutation is None else tuple(mutation)
    return _output("_show", name, seeds.start, seeds.stop, fault)


def in_gate(seeds: int) -> int:
    """Return how many of so many seeds run: two fifths, but all in ``make test-all``."""
    return seeds if os.environ.get("TESTS_ALL") == "1" else seeds * 2 // 5


def in_virtual_time(*helpers: str, seeds: int = 20) -> Callable[[Callable[..., None]], Any]:
    """Have a test run in simulations: its waits are exact, and take no time.

    Args:
        helpers: modules that it uses, and that use threads, clocks or sockets themselves.
        seeds: how many schedules it runs under; see ``in_gate``.
    """

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run_separately(**arguments: Any) -> None:
            file = inspect.getfile(test)
            failure = _output("_show_test", file, test.__name__, arguments, helpers, in_gate(seeds))
            assert not failure, failure

        return pytest.mark.process(run_separately)

    return decorate


def _output(function: str, *arguments: Any) -> str:
    return output_of(__name__, function, *arguments, timeout=SECONDS)


def _show(name: str, start: int, stop: int, fault: tuple[Any, ...] | None) -> None:
    mutation = contextlib.nullcontext() if fault is None else mutated(Mutation(*fault))
    with simulated(), mutation:
        seed = _show_first(SCENARIOS[name], range(start, stop))
    if seed is not None:
        print(f"\nTo run it again: python tests/simulation/simulate.py {name} --seed {seed}")


def _show_test(
    file: str, name: str, arguments: dict[str, Any], helpers: tuple[str, ...], seeds: int
) -> None:
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.import_module(Path(file).stem)
    test = inspect.unwrap(vars(module)[name])
    with simulated(more=[module, *map(importlib.import_module, helpers)]):
        _show_first(_Test(name, test, arguments), range(seeds))


def _show_first(scenario: Scenario[Any], seeds: range) -> int | None:
    """Print how the first seed fails that does, and return it."""
    for seed in seeds:
        failure = run(scenario, seed).failure
        if failure is not None:
            print(f"with seed {seed}: {failure.summary}\n{failure.details}")
            return seed
    return None


@dataclasses.dataclass
class _Test:
    """A test as a scenario, whose program is its arguments."""

    name: str
    test: Callable[..., None]
    arguments: dict[str, Any]

    def program(self, rng: random.Random) -> dict[str, Any]:
        return self.arguments

    def smaller(self, program: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return iter(())

    def run(self, program: dict[str, Any], scheduler: Scheduler) -> None:
        self.test(**program)
