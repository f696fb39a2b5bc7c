"""Run a scenario in a process of its own.

While the code is simulated, all threads of this process that run it are, too: those that other
tests have left idle would take part.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from simulation.mutation import Mutation, mutated
from simulation.replacing import simulated
from simulation.scenario import run
from simulation.scenarios import SCENARIOS

__all__ = ["first_failure"]

SECONDS = 900.0
CODE = "import sys; from simulation.separately import _show; _show(*eval(sys.argv[1]))"


def first_failure(name: str, seeds: range, mutation: Mutation | None = None) -> str:
    """Return how the first seed fails that does; empty if none does.

    Args:
        name: of the scenario.
        seeds: to run, in order.
        mutation: of the code that runs.
    """
    fault = None if mutation is None else tuple(mutation)
    done = subprocess.run(
        [sys.executable, "-c", CODE, repr((name, seeds.start, seeds.stop, fault))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _show(name: str, start: int, stop: int, fault: tuple[Any, ...] | None) -> None:
    mutation = contextlib.nullcontext() if fault is None else mutated(Mutation(*fault))
    with simulated(), mutation:
        for seed in range(start, stop):
            failure = run(SCENARIOS[name], seed).failure
            if failure is not None:
                print(
                    f"{failure.summary}\n{failure.details}\n\nTo run it again: "
                    f"python tests/simulation/simulate.py {name} --seed {seed}"
                )
                return
