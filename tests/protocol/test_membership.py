"""A key's state machine: joins, refusals, missing ranks, members that leave or die."""

import pytest

from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import RESTARTS, Admitted, Member, Refused


def member(name, rank=-1, world_size=None, token=None):
    return Member(token or f"{name}-{rank}", name, rank, world_size)


def join(group, *members):
    """Join all members; return the decisions by token."""
    decisions = {}
    for each in members:
        decisions.update({d.token: d for d in group.join(each)})
    return decisions


@pytest.fixture
def group():
    return Group("key")


class TestStatic:
    def test_all_are_admitted_when_the_last_one_joins(self, group):
        a, b = member("a", 0, 2), member("b", 1, 2)
        assert join(group, a) == {}
        decisions = join(group, b)
        assert set(decisions) == {"a-0", "b-1"}
        assert [m.name for m in decisions["a-0"].snapshot.members] == ["a", "b"]
        assert decisions["b-1"].snapshot.me.id == 1

    def test_all_are_refused_if_two_have_one_name(self, group):
        decisions = join(group, member("a", 0, 2), member("a", 1, 2))
        assert len(decisions) == 2
        assert all("is not unique" in d.reason for d in decisions.values())

    def test_the_second_with_a_taken_rank_is_refused(self, group):
        decisions = join(group, member("a", 0, 2), member("b", 0, 2))
        assert list(decisions) == ["b-0"] and "asks for rank 0" in decisions["b-0"].reason

    def test_another_world_size_is_refused(self, group):
        decisions = join(group, member("a", 0, 2), member("b", 1, 3))
        assert "world_size 3" in decisions["b-1"].reason

    def test_a_complete_group_refuses_one_more(self, group):
        join(group, member("a", 0, 1))
        decisions = join(group, member("b", 0, 1))
        assert "is complete" in decisions["b-0"].reason

    def test_a_pending_join_lists_the_missing_ranks(self, group):
        group.join(member("a", 1, 3))
        assert group.missing("a-1") == [0, 2] and group.missing("other") == []

    def test_a_withdrawn_join_frees_its_rank(self, group):
        group.join(member("a", 0, 2))
        assert group.remove("a-0", "left") and group.is_empty
        decisions = join(group, member("a", 0, 2, token="again"), member("b", 1, 2))
        assert all(isinstance(d, Admitted) for d in decisions.values()) and len(decisions) == 2

    def test_a_join_after_a_death_starts_a_new_session(self, group):
        join(group, member("a", 0, 2), member("b", 1, 2))
        first = group.find("a-0")
        first.remove("b-1", "died", "killed")
        decisions = join(group, member("a", 0, 2, "a2"), member("b", 1, 2, "b2"))
        assert decisions["a2"].snapshot.session != first.number
        assert group.find("a-0") is first and group.find("a2") is not first


class TestDynamic:
    def test_members_are_admitted_at_once_and_get_free_ids(self, group):
        decisions = join(group, member("a"), member("b", 5), member("c"))
        ids = [d.snapshot.me.id for d in decisions.values()]
        assert ids == [0, 5, 1]

    def test_names_and_ranks_are_unique_among_the_members(self, group):
        join(group, member("a", 0))
        assert "is not unique" in join(group, member("a", 1))["a-1"].reason
        assert "asks for rank 0" in join(group, member("b", 0))["b-0"].reason
        group.find("a-0").remove("a-0", "left")
        again = join(group, member("a", 0, token="again"))
        assert isinstance(again["again"], Admitted)

    def test_an_id_used_again_has_another_epoch(self, group):
        group.join(member("a", 0))
        group.join(member("b", 1))
        session = group.find("a-0")
        session.remove("a-0", "left")
        decisions = join(group, member("c", 0))
        assert decisions["c-0"].snapshot.me.epoch == 1

    def test_a_worker_that_is_started_again_gets_its_id_if_that_is_free(self, group):
        restarted = Member("b-1", "b", -1, extra={RESTARTS: 1})
        join(group, member("a"), restarted, member("c"))
        group.remove("a--1", "left")
        group.remove("b-1", "died")
        again = Member("b-2", "b", -1)
        admitted = join(group, again)["b-2"].snapshot.me
        assert (admitted.id, admitted.epoch) == (1, 1)
        group.remove("b-2", "died")
        join(group, member("d"), member("e"))
        assert join(group, Member("b-3", "b", -1))["b-3"].snapshot.me.id == 3

    def test_who_joins_learns_of_workers_that_are_started_again(self, group):
        join(group, member("a"), Member("b-1", "b", -1, extra={RESTARTS: 1}), member("c"))
        group.remove("b-1", "died", "it was killed")
        group.remove("c--1", "died", "it was killed")
        [change] = join(group, member("d"))["d--1"].snapshot.restarting
        assert (change.kind, change.member.name, change.cause) == ("died", "b", "it was killed")
        join(group, Member("b-2", "b", -1))
        assert not join(group, member("e"))["e--1"].snapshot.restarting

    def test_changes_are_listed_in_order(self, group):
        group.join(member("a", 0))
        group.join(member("b", 1))
        session = group.find("a-0")
        version = session.version
        session.remove("b-1", "died", "killed")
        (change,) = session.since(version)
        assert (change.kind, change.member.name, change.cause) == ("died", "b", "killed")
        assert not session.remove("b-1", "left")


@pytest.mark.parametrize(("first", "second"), [(1, None), (None, 1)])
def test_static_and_dynamic_members_do_not_mix(group, first, second):
    join(group, member("a", 0, first))
    (decision,) = join(group, member("b", 0, second)).values()
    assert isinstance(decision, Refused) and "mixes statically and dynamically" in decision.reason


def test_a_barrier_does_not_wait_for_the_dead(group):
    for name in "abc":
        group.join(member(name))
    session = group.find("a--1")
    session.report("tag", "a--1", 1)
    assert session.reached("tag") is None and session.absent("tag") == ["b", "c"]
    session.report("tag", "b--1", 2)
    session.remove("c--1", "died")
    assert session.reached("tag") == {"a": 1, "b": 2}


def test_a_group_is_empty_when_all_have_left(group):
    group.join(member("a"))
    assert not group.is_empty
    assert group.remove("a--1", "left") and not group.remove("a--1", "left")
    assert group.is_empty
