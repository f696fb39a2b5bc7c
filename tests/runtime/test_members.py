"""What a worker knows of the members of its group."""

import threading
from typing import Any

import pytest

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.membership import Member
from rayrpc._runtime.members import Members
from rayrpc.errors import RpcError, WorkerDiedError

WAIT = 60.0


class Group:
    """A group, its directory, and what is reported of its members."""

    def __init__(self) -> None:
        self.me, self.other = member("me", 0), member("other", 1)
        self.present = [self.me, self.other]
        self.reported: list[Any] = []
        self.members = Members(
            self.me, self.present, lambda: self.present, self.on_joined, self.on_left
        )

    def on_joined(self, member: Member, predecessor: Member | None) -> None:
        self.reported.append((member.name, predecessor and predecessor.name))

    def on_left(self, left: Member) -> None:
        self.reported.append(left.name)

    def remove(self, left: Member) -> None:
        self.members.remove(left, WorkerDiedError(left.name, "it was killed", ""))


def member(name: str, rank: int, epoch: int = 0) -> Member:
    return Member(f"token of {name} {epoch}", name, rank, epoch=epoch)


@pytest.fixture
def group():
    return Group()


def test_a_member_joins_and_leaves_once(group):
    third = member("third", 2)
    group.members.add(third)
    group.members.add(third)
    assert group.members.lookup("third") is third
    group.remove(third)
    group.members.add(third)  # reported late
    assert group.members.find(2) is None
    assert group.reported == [("third", None), "third"]


def test_a_member_is_reported_before_it_can_be_found(group):
    found: list[Any] = []
    group.members._on_joined = lambda *_: found.append(group.members.find(2))
    group.members.add(member("third", 2))
    assert found == [None] and group.members.find(2) is not None


def test_the_predecessor_of_a_member_leaves_without_a_report(group):
    again = member("again", 1, epoch=1)
    group.members.add(again)
    group.remove(group.other)
    assert group.members.find(1) is again
    assert group.reported == [("again", "other")]


class TestRestarts:
    def test_a_member_that_died_restarts_until_another_has_its_name(self, group):
        old = group.other
        group.members.remove(old, WorkerDiedError("other", "it was killed"), is_restarted=True)
        assert group.members.lookup("other") is old and old.token in group.members.restarting
        seen = threading.Event()

        def wait():
            group.members.wait_for_restart(old, WAIT)
            seen.set()

        threading.Thread(target=wait, daemon=True).start()
        assert not seen.wait(0.05)
        again = member("other", 1, epoch=1)
        group.members.add(again)
        assert seen.wait(WAIT)
        assert group.members.lookup("other") is again and old.token not in group.members.restarting
        assert group.members.lookup(WorkerInfo("other", 1)) is again

    def test_a_wait_ends_with_its_time(self, group):
        old = group.other
        group.members.remove(old, WorkerDiedError("other", "it was killed"), is_restarted=True)
        group.members.wait_for_restart(old, 0.01)
        assert old.token in group.members.restarting

    def test_one_that_is_not_started_again_is_not_waited_for(self, group):
        group.remove(group.other)
        assert group.other.token not in group.members.restarting

    @pytest.mark.parametrize("is_late", [False, True])
    def test_the_owner_of_an_rref_is_gone_though_another_has_its_name(self, group, is_late):
        again = member("other", 1, epoch=1)
        if is_late:
            group.members.add(again)
        group.members.remove(group.other, WorkerDiedError("other", "it was killed"), True)
        group.members.add(again)
        assert group.other.token not in group.members.restarting
        error = group.members.death_of_owner(WorkerInfo("other", 1))
        assert error is not None
        assert "it was killed. It has joined again since" in str(error)
        assert group.members.lookup("other") is again


def test_one_change_is_reported_after_the_other(group):
    begun, go_on = threading.Event(), threading.Event()
    on_joined = group.on_joined

    def slow(joined, predecessor):
        begun.set()
        go_on.wait(WAIT)
        on_joined(joined, predecessor)

    group.members._on_joined = slow
    again = member("again", 1, epoch=1)
    first = threading.Thread(target=group.members.add, args=(again,))
    first.start()
    assert begun.wait(WAIT)
    others = [
        threading.Thread(target=group.remove, args=(group.other,)),
        threading.Thread(target=group.members.add, args=(again,)),
    ]
    for thread in others:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    go_on.set()
    for thread in (first, *others):
        thread.join(WAIT)
    assert group.members.find(1) is again
    assert group.reported == [("again", "other")]


def test_a_finalizer_that_runs_at_a_change_may_ask_for_members(group):
    third = member("third", 2)
    group.present.append(third)
    found: list[Any] = []
    group.members._on_joined = lambda *_: found.append(group.members.lookup("third"))
    adds = threading.Thread(target=group.members.add, args=(third,), daemon=True)
    adds.start()
    adds.join(WAIT)
    assert not adds.is_alive() and found[0] is third


def test_a_sender_is_present_until_another_member_has_its_id(group):
    assert group.members.is_present(1, 0)
    group.remove(group.other)
    assert group.members.is_present(1, 0)  # its last calls
    group.members.add(member("again", 1, epoch=1))
    assert group.members.is_present(1, 1) and not group.members.is_present(1, 0)


def test_a_sender_that_is_reported_late_is_looked_up(group):
    group.present.append(member("again", 1, epoch=1))
    assert group.members.is_present(1, 1)
    assert group.reported == [("again", "other")]
    assert not group.members.is_present(1, 0)
    assert group.members.is_present(2, 0)  # one that has left before this worker was notified


def test_what_a_caller_raises_of_a_death_keeps_nothing_of_the_caller(group):
    group.remove(group.other)
    owner = WorkerInfo(group.other.name, group.other.id)
    members = group.members
    for death_of, of in ((members.death_of, group.other), (members.death_of_owner, owner)):
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match="it was killed") as raised:
                raise death_of(of)
            assert len(raised.traceback) == 1  # and no frames of another caller


def test_a_name_that_nobody_has_is_an_error(group):
    with pytest.raises(RpcError, match="could not find destination nobody"):
        group.members.lookup("nobody")


def test_a_member_joins_while_the_names_of_all_are_listed(group):
    class JoinMeanwhile(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            group.members.add(member("fourth", 3))
            return False

    group.members.add(Member("token of third", "third", 2, extra=JoinMeanwhile()))
    with pytest.raises(RpcError, match="nobody: this group has the workers me, other, third"):
        group.members.lookup("nobody")
