"""The table of a world, in one process whose group is faked."""

from types import SimpleNamespace

import pytest

from rayrpc._runtime import current
from rayrpc.errors import RpcError
from rayrpc.parallel.distributed import lookup
from rayrpc.parallel.distributed.lookup import Holder

ALICE, BOB = Holder("alice", "token-a"), Holder("bob", "token-b")


class FakeAgent:
    """The members of a group, by hand."""

    def __init__(self, holders):
        self.holders = list(holders)
        self.members = SimpleNamespace(all=self._all)

    def _all(self):
        return [SimpleNamespace(name=name, token=token) for name, token in self.holders]

    def lookup(self, name):
        if name not in {each.name for each in self.holders}:
            raise RpcError(f"no member {name!r}")


@pytest.fixture
def agent(monkeypatch):
    agent = FakeAgent([ALICE, BOB])
    monkeypatch.setattr(current, "get_agent", lambda: agent)
    monkeypatch.setattr(lookup, "_table", lookup._Table())
    return agent


def test_a_key_has_one_holder(agent):
    assert lookup.add("key", ALICE) and lookup.find("key") == "alice"
    assert not lookup.add("key", BOB) and not lookup.remove("key", BOB)
    assert lookup.remove("key", ALICE) and lookup.find("key") is None
    assert lookup.add("key", BOB)


def test_an_entry_ends_with_its_holders_membership(agent):
    lookup.add("key", ALICE)
    agent.holders[0] = Holder("alice", "another token")
    assert lookup.find("key") is None and not lookup.remove("key", ALICE)
    lookup.add("key", ALICE)
    assert lookup.add("key", BOB) and lookup.find("key") == "bob"


def test_a_barrier_completes_when_all_have_entered(agent):
    members = ("alice", "bob")
    first = lookup.enter_barrier("barrier", ALICE, members)
    assert not first.done()
    second = lookup.enter_barrier("barrier", BOB, members)
    assert first.done() and second.done()
    assert not lookup.enter_barrier("barrier", ALICE, members).done(), "a new one"


def test_a_process_that_entered_twice_waits_for_its_last_call(agent):
    former = lookup.enter_barrier("barrier", ALICE, ("alice", "bob"))
    last = lookup.enter_barrier("barrier", ALICE, ("alice", "bob"))
    assert former.done() and not last.done()


def test_a_process_may_leave_a_barrier_that_is_not_complete(agent):
    members = ("alice", "bob")
    first = lookup.enter_barrier("barrier", ALICE, members)
    lookup.leave_barrier("barrier", ALICE)
    assert first.done()
    assert not lookup.enter_barrier("barrier", BOB, members).done()
    lookup.leave_barrier("no barrier", ALICE)


def test_a_dead_member_is_not_counted_at_a_barrier(agent):
    members = ("alice", "bob")
    first = lookup.enter_barrier("barrier", ALICE, members)
    del agent.holders[0]
    assert not lookup.enter_barrier("barrier", BOB, members).done()
    assert first.done()
