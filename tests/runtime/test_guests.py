"""Guests of a group of fixed size: they call its workers, and it goes on and ends without them."""

import threading
from typing import Any

import pytest
from conftest import eventually
from memory_workers import WAIT, memory_group

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.membership import GUEST
from rayrpc.errors import CallError, GroupError, WorkerDiedError


class Group:
    """Two workers, and a guest."""

    def __init__(self, start):
        made: list[Any] = []
        first = threading.Thread(target=lambda: made.append(start("a", 0, 2)))
        first.start()  # it waits for the other one
        self.b = start("b", 1, 2)
        first.join(WAIT)
        (self.a,) = made
        self.guest = self.join(start, "guest")

    @staticmethod
    def join(start, name):
        return start(name, extra={GUEST: True})


go = threading.Event()
there: list[Any] = []  # the group; functions that are called find it


@pytest.fixture
def group():
    go.clear()
    with memory_group() as start:
        there[:] = [Group(start)]
        yield there[0]
        go.set()
        there.clear()


def add(x, y):
    return x + y


def wait():
    return go.wait(WAIT)


def to_here(rref):
    return rref.to_here(WAIT)


def send_on(rref):
    return there[0].a.sync("b", to_here, rref)


def test_a_guest_calls_and_is_called(group):
    a, b, guest = group.a, group.b, group.guest
    assert (guest.member.id, guest.member.world_size) == (2, None)
    assert [guest.sync(to, add, 1, 2) for to in ("a", 1)] == [3, 3]
    assert a.sync(guest, add, 1, 2) == b.sync(2, add, 1, 2) == 3
    assert a.sync(WorkerInfo(guest.name, 2), add, 1, 2) == 3


def test_a_guest_is_no_worker_of_the_group(group):
    for each in (group.a, group.b, group.guest):
        assert [info.name for info in each.agent.get_worker_infos()] == ["a", "b"]
        assert each.agent.members.is_static and len(each.agent.members.all()) == 3
        with pytest.raises(RuntimeError, match=r"could not find destination c: .* workers a, b\."):
            each.find("c")


def test_rrefs_of_a_guest_reach_all(group):
    mine = group.guest.remote(group.guest, add, 1, 2)
    assert group.guest.sync("a", to_here, mine) == 3

    assert group.guest.sync("a", send_on, mine) == 3
    assert group.guest.remote("a", add, 3, 4).to_here(WAIT) == 7
    del mine
    assert eventually(group.guest.is_empty)


def test_a_guest_may_be_reported_late(group):
    members = group.b.agent.members
    death = WorkerDiedError("guest", "of no matter", "")
    members.remove(group.guest.member, death)
    del members._deaths[group.guest.member.token], members._former["guest"]
    asked = []
    fetch = members._fetch
    members._fetch = lambda: asked.append(1) or fetch()
    with pytest.raises(RuntimeError, match="could not find destination"):
        members.lookup(1000)
    with pytest.raises(RuntimeError, match="could not find destination"):
        members.lookup("gust")  # workers alone have names that a program knows
    assert len(asked) == 1
    assert members.lookup(2) == group.guest.member and members.guests == {2}


def test_a_group_ends_while_a_guest_calls(group):
    a, b, guest = group.a, group.b, group.guest
    ended: list[str] = []
    errors: list[Exception] = []

    def call_on(to):
        try:
            while True:
                guest.sync(to, add, 1, 2)
        except (CallError, WorkerDiedError) as exc:
            errors.append(exc)

    def end(worker):
        worker.agent.join(shutdown=True, timeout=WAIT)
        ended.append(worker.name)
        worker.agent.shutdown()

    callers = [threading.Thread(target=call_on, args=(to,)) for to in "ab"]
    enders = [threading.Thread(target=end, args=(worker,)) for worker in (a, b)]
    for each in (*callers, *enders):
        each.start()
    for each in (*callers, *enders):
        each.join(WAIT)
    assert sorted(ended) == ["a", "b"] and len(errors) == 2
    guest.agent.drain(WAIT)  # it waits for no one


def test_a_call_of_a_guest_is_waited_for(group):
    future = group.guest.future("a", wait)
    assert eventually(lambda: group.a.agent.callee.active)
    with pytest.raises(GroupError, match="0 of its own, 1 of others"):
        group.a.agent.join(shutdown=True, timeout=0.2)
    go.set()
    assert future.wait() is True


def test_calls_of_guests_are_not_counted(group):
    for to in (group.a, group.b):
        group.guest.sync(to, add, 1, 2)
        assert to.agent.callee.served == 0
    group.a.sync("b", add, 1, 2)
    assert group.b.agent.callee.served == 1


def test_a_guest_that_dies_ends_nothing_else(group):
    a, b = group.a, group.b
    pending = a.future("guest", wait)
    group.guest.die()
    with pytest.raises(WorkerDiedError, match="guest"):
        pending.wait()
    go.set()
    assert a.sync("b", add, 1, 2) == 3
    threads = [
        threading.Thread(target=each.agent.join, args=(True, WAIT), daemon=True) for each in (a, b)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT)
        assert not each.is_alive()
