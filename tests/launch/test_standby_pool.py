"""Which processes stand by, when they are replaced, and when the pool is over; without Ray."""

import fcntl
import os

import pytest

from rayrpc.errors import RpcError
from rayrpc.launch.standby_pool import (
    ENDED,
    FREE,
    LOADING,
    MAX_FAILURES,
    TAKEN,
    StandbyPool,
    process_of,
)


class FakeActors:
    """Actors that change as a test says."""

    def __init__(self):
        self.started, self.killed = [], []
        self.refusing = set()
        self.todo = []

    def start(self):
        self.started.append(f"a{len(self.started)}")
        return self.started[-1]

    def changes(self, seconds):
        found, self.todo = self.todo, []
        return found

    def end(self, name, state):
        if name in self.refusing:
            return False
        self.killed.append(name)
        return True


@pytest.fixture
def actors():
    return FakeActors()


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def pool(actors, now):
    return StandbyPool(actors, 3, 2, 60.0, lambda: now[0])


def step(pool, actors, *changes):
    actors.todo = list(changes)
    return pool.step()


def counts(pool):
    return pool.count(LOADING), pool.count(FREE), pool.count(TAKEN)


def test_only_some_load_at_once_and_it_is_up_when_all_stand_by(pool, actors):
    assert step(pool, actors) and counts(pool) == (2, 0, 0) and not pool.is_up
    step(pool, actors, ("a0", FREE), ("a1", FREE))
    assert counts(pool) == (0, 2, 0) and not pool.is_up
    step(pool, actors)
    assert actors.started == ["a0", "a1", "a2"] and not pool.is_up
    step(pool, actors, ("a2", FREE))
    assert pool.is_up


def up(pool, actors):
    step(pool, actors)
    step(pool, actors, ("a0", FREE), ("a1", FREE))
    step(pool, actors, ("a2", FREE))
    step(pool, actors)
    step(pool, actors, ("a2", FREE))
    assert pool.is_up


def test_one_that_was_taken_is_replaced_when_it_has_ended(pool, actors):
    up(pool, actors)
    step(pool, actors, ("a1", TAKEN))
    step(pool, actors)
    assert len(actors.started) == 3 and counts(pool) == (0, 2, 1) and pool.is_up
    step(pool, actors, ("a1", ENDED))
    step(pool, actors)
    assert len(actors.started) == 4 and counts(pool) == (1, 2, 0)


def test_without_use_it_is_over_after_the_timeout(pool, actors, now):
    up(pool, actors)
    now[0] = 59.0
    step(pool, actors, ("a1", TAKEN))
    now[0] = 200.0
    assert step(pool, actors)  # it is in use
    step(pool, actors, ("a1", ENDED))
    now[0] = 259.0
    assert step(pool, actors) and actors.killed == []
    now[0] = 261.0
    assert not step(pool, actors)
    assert sorted(actors.killed) == ["a0", "a2", "a3"]


def test_no_timeout_is_never(actors, now):
    pool = StandbyPool(actors, 1, 1, 0.0, lambda: now[0])
    step(pool, actors)
    now[0] = 1e9
    assert step(pool, actors) and actors.killed == []


def test_it_ends_when_those_that_were_taken_have_ended(pool, actors):
    up(pool, actors)
    step(pool, actors, ("a1", TAKEN))
    pool.end()
    assert step(pool, actors) and sorted(actors.killed) == ["a0", "a2"]
    assert step(pool, actors, ("a1", ENDED)) and len(actors.started) == 3
    assert not step(pool, actors)


def test_one_that_is_taken_just_when_it_ends_is_left_to_its_program(pool, actors):
    up(pool, actors)
    pool.end()
    actors.refusing.add("a1")
    assert step(pool, actors, ("a1", TAKEN)) and "a1" not in actors.killed
    assert step(pool, actors, ("a1", ENDED))
    assert not step(pool, actors)


def test_processes_that_cannot_load_are_not_started_for_ever(pool, actors):
    with pytest.raises(RpcError, match="load torch"):
        for _ in range(MAX_FAILURES):
            step(pool, actors)
            step(pool, actors, (actors.started[-1], ENDED))


def test_the_process_is_known_by_its_lock(tmp_path):
    path = tmp_path / "file"
    assert process_of(path) is None
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(os.getpid(), file=file, flush=True)
        assert process_of(path) == os.getpid()
    assert process_of(path) is None
