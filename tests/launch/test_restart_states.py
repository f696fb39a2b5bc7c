"""Which workers are started again, without workers."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from conftest import eventually

from rayrpc._protocol.membership import Change, Member
from rayrpc._runtime.observers import Observers
from rayrpc.errors import WorkerDiedError
from rayrpc.launch.restarts import Restarts

WAIT = 60.0


class Agent:
    """What Restarts needs of an agent; workers die and join by hand."""

    def __init__(self) -> None:
        self.observers = Observers(lambda task: threading.Thread(target=task).start())
        self.epoch = 0
        self.members = self  # it stands for them, too
        self.is_dead = False

    def lookup(self, worker: str) -> Member:
        return Member(f"{worker} {self.epoch}", worker, 1, epoch=self.epoch)

    def death_of(self, member: Member) -> WorkerDiedError | None:
        return WorkerDiedError("ps", f"killed in epoch {self.epoch}") if self.is_dead else None

    def join(self) -> None:
        self.epoch += 1
        self.is_dead = False

    def die(self, kind: str = "died") -> None:
        self.is_dead = True
        self.observers.report(Change(0, kind, self.lookup("ps"), "killed"))


class Group:
    """Restarts of "ps", and how they went."""

    def __init__(self, limit: int, start: Callable[[Agent], None] = Agent.join) -> None:
        self.agent = cast(Any, Agent())
        self.starts: list[int] = []
        self._do = start
        self.restarts = Restarts(self.agent, ["ps"], limit, self.start)

    def start(self, worker: str, left: int) -> None:
        self.starts.append(left)
        self._do(self.agent)

    def has_started(self, *starts: int) -> bool:
        return self.starts == list(starts) and self.runs()

    def runs(self) -> bool:
        return not self.agent.is_dead and not self.restarts._starting


def test_a_worker_is_started_as_often_as_it_may_be(caplog):
    group = Group(2)
    group.agent.die()
    assert eventually(lambda: group.has_started(1))
    group.agent.die()
    assert eventually(lambda: group.has_started(1, 0))
    group.agent.die()
    assert eventually(lambda: "'ps' is not started any more: killed in epoch 2" in caplog.text)
    group.agent.die()
    time.sleep(0.1)
    assert group.starts == [1, 0]


def test_a_worker_without_a_limit_is_always_started():
    group = Group(-1)
    for count in range(1, 20):
        group.agent.die()
        assert eventually(functools.partial(group.has_started, *[-1] * count))


def test_one_that_has_left_is_not_started():
    group = Group(1)
    group.agent.die(kind="left")
    time.sleep(0.1)
    assert group.starts == []


def test_one_that_died_before_it_was_observed_is_started():
    agent = cast(Any, Agent())
    agent.is_dead = True
    Restarts(agent, ["ps"], 1, lambda worker, left: agent.join())
    assert eventually(lambda: agent.epoch == 1)


def test_one_that_dies_as_it_starts_is_started_again_by_the_same_thread(caplog):
    def start(agent: Agent) -> None:
        agent.join()
        if agent.epoch < 3:
            agent.die()  # its death is observed while the start is under way
            time.sleep(0.1)

    group = Group(5, start)
    group.agent.die()
    assert eventually(lambda: group.agent.epoch == 3 and group.runs())
    assert group.starts == [4, 3, 2]


def test_starts_that_fail_count(caplog):
    def start(agent: Agent) -> None:
        raise ArithmeticError("as expected")

    group = Group(3, start)
    group.agent.die()
    assert eventually(lambda: "not started any more: its start failed: Arithm" in caplog.text)
    assert group.starts == [2, 1, 0]


@pytest.mark.usefixtures("quick_switches")
def test_no_death_is_missed_and_no_two_threads_start_a_worker():
    """Deaths come at any moment of a start."""
    busy = threading.Lock()

    def start(agent: Agent) -> None:
        assert busy.acquire(blocking=False)
        agent.join()
        busy.release()

    group = Group(-1, start)
    for _ in range(500):
        group.agent.die()
        end = time.monotonic() + WAIT
        while group.agent.is_dead:
            assert time.monotonic() < end
            time.sleep(0)
    assert eventually(group.runs) and all(left == -1 for left in group.starts)


@pytest.mark.usefixtures("quick_switches")
def test_a_worker_may_die_at_any_moment_of_stop():
    for _ in range(300):
        group = Group(-1)
        death = threading.Thread(target=group.agent.die)
        death.start()
        group.restarts.stop()
        started = list(group.starts)
        death.join(WAIT)
        assert not death.is_alive() and group.starts == started


def test_stop_waits_for_a_start_and_allows_no_other():
    begun, goes_on = threading.Event(), threading.Event()

    def start(agent: Agent) -> None:
        begun.set()
        assert goes_on.wait(WAIT)
        agent.join()
        agent.is_dead = True

    group = Group(-1, start)
    group.agent.die()
    assert begun.wait(WAIT)
    stopper = threading.Thread(target=group.restarts.stop)
    stopper.start()
    time.sleep(0.1)
    assert stopper.is_alive()
    goes_on.set()
    stopper.join(WAIT)
    assert not stopper.is_alive()
    group.agent.die()
    time.sleep(0.1)
    assert group.starts == [-1]
