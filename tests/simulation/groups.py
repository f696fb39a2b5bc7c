"""Programs of a group of workers: users, which take steps, and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from simulation.faults import Faults, Injector
from simulation.large import Limits
from simulation.primitives import Thread
from simulation.scheduler import Scheduler
from simulation.workers import WORKERS, check_connections, start_workers

__all__ = ["LIMITS", "GroupRun", "Program", "User", "smaller"]

LIMITS = Limits(receive_buffer=4096)


@dataclasses.dataclass(frozen=True)
class User:
    """A thread of a worker, which takes steps one after the other."""

    worker: int
    steps: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What happens in a group.

    Args:
        workers: how many.
        users: threads of the workers.
        faults: what goes wrong.
        slots: how many functions a worker runs at a time.
        near: the workers are on one node, else each on its own.
    """

    workers: int
    users: tuple[User, ...]
    faults: Faults
    slots: int = 16
    near: bool = False


def smaller(
    program: Program, simpler: Callable[[Any], Iterable[Any]] = lambda step: ()
) -> Iterator[Program]:
    """Yield programs with less: faults, users, steps.

    Args:
        program: to be made smaller.
        simpler: returns steps that do less than one.
    """
    for faults in program.faults.smaller():
        yield dataclasses.replace(program, faults=faults)
    if program.near:
        yield dataclasses.replace(program, near=False)
    for index, user in enumerate(program.users):
        before, after = program.users[:index], program.users[index + 1 :]
        if before or after:
            yield dataclasses.replace(program, users=before + after)
        for number, step in enumerate(user.steps):
            steps = user.steps[:number], user.steps[number + 1 :]
            variants = [steps[0] + steps[1]] if any(steps) else []
            variants += [(*steps[0], simple, *steps[1]) for simple in simpler(step)]
            for variant in variants:
                less = dataclasses.replace(user, steps=variant)
                yield dataclasses.replace(program, users=(*before, less, *after))


class GroupRun:
    """Run a program.

    Args:
        program (Program): to run.
        scheduler (Scheduler): runs it.
        echo (Callable): see ``Injector``.
    """

    def __init__(self, program: Program, scheduler: Scheduler, echo: Callable[..., Any]) -> None:
        self.program = program
        self.faults = program.faults
        self.injector = Injector(program.faults, scheduler, echo)

    def run(self) -> None:
        """Start the workers and the users, and wait until all users have ended."""
        start_workers(self.program.workers, self.program.slots, self.program.near)
        users = [
            Thread(target=self.use, name=f"user {index}", args=(index, user))
            for index, user in enumerate(self.program.users)
        ]
        self.injector.start()
        for thread in users:
            thread.start()
        self.injector.users_have_started()
        for thread in users:
            thread.join()
        self.injector.stop()
        if not self.faults.may_lose:
            check_connections(worker.transport for worker in WORKERS)

    def use(self, index: int, user: User) -> None:
        """Take the steps of a user, in a thread of its own."""
        raise NotImplementedError
