"""Who is in a group with whom: runs that start their ranks, and ranks that are started by hand."""

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrpc._protocol import group as group_module
from rayrpc._protocol import membership, pending_joins
from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import Admitted, Member, Refused
from rayrpc._protocol.origin import Origin


def member(run, rank, world_size, launched=True, ranks=1, started=0, named=False, name=""):
    """Return a join of a run; of a process that its program has started if ``launched``."""
    origin = Origin(f"user-{run}", "host", "net", f"{run}.py", 7, run, launched, ranks, started)
    token = f"{run}{rank}{name}"
    return Member(token, name or f"w{rank}", rank, world_size, origin=origin, named=named)


def by_hand(run, rank, world_size, started=0):
    return member(run, rank, world_size, launched=False, started=started)


def join(group, *members):
    """Join all; return the decisions by token."""
    decisions = {}
    for each in members:
        decisions.update({d.token: d for d in group.join(each)})
    return decisions


def combine(group):
    return {d.token: d for d in group.combine()}


def admitted(decisions):
    """Return the tokens of the members of each session."""
    sessions = {
        tuple(m.token for m in d.snapshot.members)
        for d in decisions.values()
        if isinstance(d, Admitted)
    }
    for tokens in sessions:
        assert set(tokens) <= set(decisions)
    return sorted(sessions)


@pytest.fixture
def group():
    return Group("key")


def calls_in(function):
    """Return how many functions of the protocol a function calls."""
    files = {module.__file__ for module in (group_module, pending_joins, membership)}
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename in files

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("launched", [True, False], ids=["of a run", "by hand"])
def test_a_join_costs_the_same_whatever_number_has_joined_before(group, launched):
    def join_one(rank):
        return calls_in(lambda: group.join(member("a", rank, 1000, launched, ranks=1000)))

    costs = [join_one(rank) for rank in range(999)]
    assert costs[1:] == costs[1:2] * 998
    assert len(join(group, member("a", 999, 1000, launched, ranks=1000))) == 1000


class TestRefusedJoins:
    """A refused join leaves nothing behind, while others are in a group under the same key."""

    def test_of_a_name_that_a_dynamic_group_has(self, group):
        join(group, by_hand("a", 0, None))
        (decision,) = join(group, by_hand("b", 0, None)).values()
        assert isinstance(decision, Refused)
        assert admitted(join(group, member("b", 0, 1))) == [("b0",)]

    def test_of_ranks_with_the_same_name(self, group):
        join(group, by_hand("h", 0, 1))
        decisions = join(group, *(member("a", rank, 2, ranks=2, name="same") for rank in (0, 1)))
        assert len(decisions) == 2 and not admitted(decisions)
        assert admitted(join(group, member("a", 0, None))) == [("a0",)]


class TestRunsThatSuffice:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 4), st.data())
    def test_never_meet_whatever_the_order(self, world_size, data):
        group = Group("key")
        joins = [
            member(run, rank, world_size, ranks=world_size)
            for run, rank in itertools.product("abc", range(world_size))
        ]
        decisions = {}
        for each in data.draw(st.permutations(joins)):
            decisions.update(join(group, each))
            decisions.update(combine(group))
        expected = [tuple(f"{run}{rank}" for rank in range(world_size)) for run in "abc"]
        assert admitted(decisions) == expected

    def test_are_known_by_any_of_their_ranks(self, group):
        # the first rank joins before its program has started the others
        join(group, member("a", 0, 2, ranks=1), by_hand("b", 1, 2), member("a", 5, 2, ranks=2))
        assert combine(group) == {}

    def test_do_not_meet_ranks_by_hand(self, group):
        assert join(group, by_hand("h", 1, 2), member("a", 0, 2, ranks=2)) == {}
        assert combine(group) == {}
        assert admitted(join(group, member("a", 1, 2, ranks=2))) == [("a0", "a1")]
        assert admitted(join(group, by_hand("i", 0, 2))) == [("i0", "h1")]

    def test_form_one_group_after_another(self, group):
        for number in range(3):
            tokens = [f"a{rank}{number}" for rank in (0, 1)]
            joins = [member("a", rank, 2, ranks=2, name=f"{number}") for rank in (0, 1)]
            joins = [Member(**{**vars(m), "name": f"w{m.id}"}) for m in joins]
            assert admitted(join(group, *joins)) == [tuple(tokens)]
            assert group.remove(tokens[0], "left")
            if number:  # the next join may come before or after the last one has left
                assert group.remove(tokens[1], "left")

    def test_refuse_one_more_of_their_own(self, group):
        join(group, *(member("a", rank, 2, ranks=3) for rank in (0, 1)))
        (decision,) = join(group, member("a", 1, 2, ranks=3, name="more")).values()
        assert "is complete" in decision.reason

    def test_may_have_another_kind_or_size_of_group(self, group):
        join(group, member("a", 0, 2, ranks=2), member("b", 0, 3, ranks=3))
        decisions = join(group, member("c", 0, None), by_hand("h", 0, None))
        assert admitted(decisions) == [("c0",), ("h0",)]
        assert isinstance(join(group, member("a", 1, None))["a1"], Refused)  # mixes kinds


class TestRunsThatDoNotSuffice:
    def test_meet_when_no_more_joins_come(self, group):
        # two hosts, on each of which a program starts two ranks of four
        joins = [member("ab"[rank // 2], rank, 4, ranks=2) for rank in (2, 0, 3, 1)]
        assert join(group, *joins) == {}
        assert admitted(combine(group)) == [("a0", "a1", "b2", "b3")]

    def test_meet_ranks_by_hand(self, group):
        joins = [by_hand("h", 0, 3), member("a", 1, 3, ranks=2), member("a", 2, 3, ranks=2)]
        assert join(group, *joins) == {}
        assert admitted(combine(group)) == [("h0", "a1", "a2")]

    def test_wait_for_their_own_first(self, group):
        # each program is rank 0, and starts rank 1
        joins = [by_hand("a", 0, 2, started=1), by_hand("b", 0, 2, started=1), member("b", 1, 2)]
        assert admitted(join(group, *joins)) == [("b0", "b1")]
        assert (
            join(group, member("c", 1, 2)) == {} == combine(group)
        )  # a's rank 1 may be yet to come
        assert admitted(join(group, member("a", 1, 2))) == [("a0", "a1")]

    def test_that_have_started_other_processes_meet_at_last(self, group):
        assert join(group, by_hand("a", 0, 2, started=1), by_hand("b", 1, 2)) == {}
        assert combine(group) == {}
        assert admitted({d.token: d for d in group.combine(starters=True)}) == [("a0", "b1")]

    def test_do_not_refuse_the_rank_that_another_run_has(self, group):
        assert join(group, member("a", 1, 2), member("b", 1, 2)) == {}
        assert join(group, member("b", 1, 2, name="x"))["b1x"].reason.startswith("RPC worker 'x'")

    def test_know_the_ranks_that_are_missing(self, group):
        join(group, member("a", 1, 4), by_hand("h", 0, 4), member("s", 2, 4, ranks=4))
        assert group.missing("a1") == [2, 3] and group.missing("s2") == [0, 1, 3]


class TestByHand:
    def test_the_last_join_completes_the_group_at_once(self, group):
        assert admitted(join(group, by_hand("a", 1, 2), by_hand("b", 0, 2))) == [("b0", "a1")]

    @pytest.mark.parametrize(
        "late",
        [by_hand("c", 0, 2), by_hand("c", 5, None)],
        ids=["complete", "another kind"],
    )
    def test_a_refusal_says_by_whom_the_key_is_used(self, group, late):
        join(group, by_hand("a", 0, 2), by_hand("b", 1, 2))
        (decision,) = join(group, late).values()
        for run in "ab":
            expected = f"user 'user-{run}', program '{run}.py', host 'host', pid 7"
            assert expected in decision.reason

    @pytest.mark.parametrize("late", [by_hand("c", 0, 2), by_hand("c", 1, 3)], ids=["rank", "size"])
    def test_a_refusal_while_the_group_forms_says_it_too(self, group, late):
        join(group, by_hand("a", 0, 2))
        (decision,) = join(group, late).values()
        assert "user 'user-a', program 'a.py', host 'host', pid 7" in decision.reason

    def test_the_end_of_a_run_frees_the_key_although_another_run_goes_on(self, group):
        join(group, *(member("a", rank, 2, ranks=2) for rank in (0, 1)))
        join(group, by_hand("h", 0, 1))
        assert group.remove("h0", "died", "killed")
        assert admitted(join(group, by_hand("i", 0, None))) == [("i0",)]


class TestDynamic:
    def test_each_run_has_a_group_of_its_own_and_ranks_by_hand_another(self, group):
        decisions = join(
            group,
            member("a", 0, None),
            member("b", 0, None),
            by_hand("h", 0, None),
            member("a", 1, None),
            member("b", 1, None),
            by_hand("i", 1, None),
        )
        last = [tuple(m.token for m in decisions[t].snapshot.members) for t in ("a1", "b1", "i1")]
        assert last == [("a0", "a1"), ("b0", "b1"), ("h0", "i1")]

    def test_a_program_meets_the_ranks_that_it_starts(self, group):
        for first, second in itertools.permutations([by_hand("a", 0, None), member("a", 1, None)]):
            tokens = [first.token, second.token]
            decisions = join(group, first, second)
            assert [m.token for m in decisions[tokens[1]].snapshot.members] == tokens
            for token in tokens:
                assert group.remove(token, "left")

    def test_all_meet_by_a_name(self, group):
        joins = [
            by_hand("h", 0, None),
            member("a", 1, None, named=True),
            member("b", 2, None, named=True),
        ]
        decisions = join(group, *joins)
        assert len(decisions["b2"].snapshot.members) == 3

    def test_one_by_hand_is_told_of_a_run_that_it_does_not_meet(self, group):
        join(group, member("a", 0, None))
        note = join(group, by_hand("h", 1, None))["h1"].snapshot.note
        assert "program 'a.py'" in note and "ray://" in note
        assert not join(group, by_hand("i", 2, None))["i2"].snapshot.note


def guest(run="guest", named=False, launched=False):
    """Return the join of a guest, which is not of the group's program."""
    origin = Origin(f"user-{run}", "host", "net", f"{run}.py", 7, run, launched)
    extra = {membership.GUEST: True}
    return Member(f"{run}-token", f"guest-{run}", -1, origin=origin, extra=extra, named=named)


class TestGuests:
    """They join a group that is there, and decide on no other join."""

    @pytest.mark.parametrize("launched", [True, False], ids=["of a run", "by hand"])
    def test_of_a_group_of_fixed_size(self, group, launched):
        join(group, *(member("a", rank, 2, launched, ranks=2) for rank in range(2)))
        snapshot = join(group, guest())["guest-token"].snapshot
        assert snapshot.me.id == 2
        assert [m.name for m in snapshot.members] == ["w0", "w1", "guest-guest"]
        assert group.find("a0").state is membership.SessionState.COMPLETE

    def test_never_have_the_id_of_a_rank(self, group):
        join(group, *(member("a", rank, 3, ranks=3) for rank in range(3)))
        group.remove("a1", "died")
        ids = [join(group, guest(str(i)))[f"{i}-token"].snapshot.me.id for i in range(2)]
        assert ids == [3, 4]
        group.remove("0-token", "left")
        assert join(group, guest("2"))["2-token"].snapshot.me == Member(
            "2-token", "guest-2", 3, epoch=1, origin=guest("2").origin, extra=guest("2").extra
        )

    def test_leave_a_group_whole(self, group):
        join(group, *(member("a", rank, 2, ranks=2) for rank in range(2)))
        session = group.find("a0")
        for kind in ("left", "died"):
            join(group, guest())
            assert group.remove("guest-token", kind)
            assert session.state is membership.SessionState.COMPLETE
        group.remove("a0", "left")
        assert session.state is membership.SessionState.BROKEN

    def test_are_not_waited_for(self, group):
        join(group, *(member("a", rank, 2, ranks=2) for rank in range(2)), guest())
        session = group.find("a0")
        session.report("tag", "guest-token", "mine")
        session.report("tag", "a0", 1)
        assert session.reached("tag") is None and session.absent("tag") == ["w1"]
        session.report("tag", "a1", 2)
        assert session.reached("tag") == {"w0": 1, "w1": 2} and not session.absent("tag")

    def test_alone_let_another_run_in(self, group):
        join(group, *(by_hand("a", rank, 2) for rank in range(2)), guest())
        for rank in range(2):
            group.remove(f"a{rank}", "left")
        again = join(group, by_hand("b", 0, None))  # even of the other kind
        assert [len(tokens) for tokens in admitted(again)] == [1]

    def test_alone_keep_a_dynamic_group(self, group):
        join(group, guest(named=True), member("a", 1, None, named=True))
        group.remove("a1", "left")
        assert join(group, guest("2", named=True))["2-token"].snapshot.me.id == 1
        snapshot = join(group, member("b", 2, None, named=True))["b2"].snapshot
        assert [m.token for m in snapshot.members] == ["guest-token", "2-token", "b2"]
        refused = join(group, by_hand("c", 0, 1))["c0"]
        assert isinstance(refused, Refused) and "mixes" in refused.reason

    def test_by_hand_do_not_bring_others_by_hand_into_the_group_of_a_run(self, group):
        join(group, *(member("a", rank, None) for rank in range(2)))
        assert len(join(group, guest())["guest-token"].snapshot.members) == 3
        assert len(join(group, by_hand("b", 0, None))["b0"].snapshot.members) == 1

    def test_of_the_run_itself_mean_its_group(self, group):
        for run in "ab":
            join(group, *(member(run, rank, 2, ranks=2) for rank in range(2)))
        snapshot = join(group, guest("b", launched=True))["b-token"].snapshot
        assert [m.token for m in snapshot.members] == ["b0", "b1", "b-token"]

    def test_that_could_mean_several_groups_are_refused(self, group):
        for run in "ab":
            join(group, *(member(run, rank, 2, ranks=2) for rank in range(2)))
        reason = join(group, guest())["guest-token"].reason
        assert "2 groups have the key" in reason and "a.py" in reason and "b.py" in reason
        group.remove("a0", "died")  # a1 goes on, but the other is whole
        snapshot = join(group, guest())["guest-token"].snapshot
        assert [m.token for m in snapshot.members] == ["b0", "b1", "guest-token"]

    def test_of_a_broken_group_join_who_is_left(self, group):
        join(group, *(member("a", rank, 2, ranks=2) for rank in range(2)))
        group.remove("a0", "died")
        snapshot = join(group, guest())["guest-token"].snapshot
        assert [m.token for m in snapshot.members] == ["a1", "guest-token"]
