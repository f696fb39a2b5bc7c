"""A group that its members restore in a directory that has forgotten it."""

import random

import pytest

from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import GUEST, RESTARTS, Admitted, Member, Refused, SessionState
from rayrpc._protocol.rebuild import Rebuild, Report

KEY = "key"


class Follower:
    """A member of a group, which applies changes when it is told to."""

    def __init__(self, snapshot, secret=b"secret"):
        self.me = snapshot.me
        self.session = snapshot.session
        self.admitted = self.version = snapshot.version
        self.members = {each.token: each for each in snapshot.members}
        self.epochs = {}
        self.synced = {}
        self.restarting = {change.member.name: change for change in snapshot.restarting}
        self.secret = secret
        self._note(snapshot.members)

    def _note(self, members):
        for each in members:
            self.epochs[each.id] = max(self.epochs.get(each.id, 0), each.epoch + 1)

    def apply(self, changes):
        for change in changes:
            if change.kind == "joined":
                self.members[change.member.token] = change.member
                self.restarting.pop(change.member.name, None)
                self._note([change.member])
            else:
                if change.kind == "died" and change.member.is_restarted:
                    self.restarting[change.member.name] = change
                del self.members[change.member.token]  # it must have been there
            self.version = change.version

    def follow(self, group):
        self.apply(group.find(self.me.token).since(self.version))

    def report(self):
        return Report(
            self.me,
            self.session,
            self.admitted,
            self.version,
            self.secret,
            self.epochs,
            self.synced,
            list(self.restarting.values()),
        )

    def restore(self, rebuild):
        if not rebuild.add(self.report()):
            assert rebuild.add(self.report(), self.members.values())

    def take_answer(self, rebuild):
        """Apply what the rebuilt group tells; return whether this is a member of it."""
        answer = rebuild.answer(self.report())
        if answer is not None:
            version, changes = answer
            self.apply(changes)
            self.version = version
        return answer is not None


def dynamic(token, rank=-1, guest=False):
    return Member(token, f"name-{token}", rank, extra={GUEST: True} if guest else {})


def join(group, member):
    (decision,) = group.join(member)
    assert isinstance(decision, Admitted), decision
    return Follower(decision.snapshot)


def static_group(size=3):
    group = Group(KEY)
    decisions = []
    for rank in range(size):
        decisions += group.join(Member(f"t{rank}", f"w{rank}", rank, world_size=size))
    assert len(decisions) == size
    return group, followers_of(decisions)


def followers_of(decisions):
    return [Follower(decision.snapshot) for decision in decisions if isinstance(decision, Admitted)]


def rebuilt(followers):
    rebuild = Rebuild(KEY)
    for each in followers:
        each.restore(rebuild)
    return rebuild, rebuild.build()


def test_members_at_one_version_send_their_members_once():
    _, followers = static_group()
    rebuild = Rebuild(KEY)
    asked = [rebuild.add(each.report()) for each in followers]
    assert asked == [False] * 3
    assert rebuild.add(followers[1].report(), followers[1].members.values())
    assert rebuild.add(followers[0].report())
    assert not rebuild.is_complete
    assert rebuild.add(followers[2].report())
    assert rebuild.is_complete
    assert rebuild.secret == b"secret"


def test_a_static_group_stays_complete():
    _, followers = static_group()
    rebuild, group = rebuilt(followers)
    (session,) = group.sessions
    assert session.state is SessionState.COMPLETE
    assert all(rebuild.answer(each.report()) == (0, []) for each in followers)
    (refused,) = group.join(Member("late", "w0", 0, world_size=3))
    assert isinstance(refused, Refused)


def test_a_static_group_that_was_broken_does_not_block_the_next():
    old, followers = static_group()
    old.remove("t1", "died")
    followers[0].follow(old)
    _, group = rebuilt([followers[0]])
    assert group.sessions[0].state is SessionState.BROKEN
    assert group.join(Member("new", "w0", 0, world_size=3)) == []


@pytest.mark.parametrize("broken", [False, True])
def test_guests_of_a_static_group_do_not_count(broken):
    old, followers = static_group()
    guest = join(old, Member("guest", "guest", -1, extra={GUEST: True}))
    if broken:
        old.remove("t1", "died")
    for each in (*followers, guest):
        if each.me.token in old.find("guest").members:
            each.follow(old)
    _, group = rebuilt([guest])
    (session,) = group.sessions
    assert session.state is (SessionState.BROKEN if broken else SessionState.COMPLETE)
    assert group.remove("guest", "left") and session.is_static
    (answer,) = group.join(Member("late", "late", -1, extra={GUEST: True}))
    assert isinstance(answer, Admitted) and answer.snapshot.me.id == 3


def test_members_that_do_not_report_are_members_until_they_are_removed():
    _, followers = static_group()
    rebuild, group = rebuilt(followers[:2])
    assert not rebuild.is_complete
    group.remove("t2", "died", "killed")
    for each in followers[:2]:
        each.follow(group)
        assert set(each.members) == {"t0", "t1"}
    followers[2].restore(rebuild)
    assert not followers[2].take_answer(rebuild)  # too late


def test_a_member_learns_what_happened_before_the_restart_and_after_it():
    old = Group(KEY)
    one, two, three = (join(old, dynamic(token)) for token in "abc")
    two.follow(old)
    old.remove("c", "died", "killed")
    two.follow(old)
    assert one.version == 1 and two.version == 4
    rebuild, group = rebuilt([two])
    four = join(group, dynamic("d"))
    one.restore(rebuild)
    assert one.take_answer(rebuild)
    assert set(one.members) == set(four.members) == {"a", "b", "d"}
    three.restore(rebuild)
    assert not three.take_answer(rebuild)  # it was declared lost
    assert one.version == group.sessions[0].version


def test_one_whom_no_other_member_knows_yet_is_a_member():
    old = Group(KEY)
    one = join(old, dynamic("a"))
    rebuild, group = rebuilt([one])
    two = join(old, dynamic("b"))
    two.restore(rebuild)
    assert two.take_answer(rebuild)
    one.follow(group)
    assert set(one.members) == set(two.members) == {"a", "b"}


def test_one_whose_id_was_given_to_another_meanwhile_is_lost():
    old = Group(KEY)
    one = join(old, dynamic("a"))
    late = join(old, dynamic("b"))
    rebuild, group = rebuilt([one])
    assert join(group, dynamic("c")).me.id == late.me.id
    late.restore(rebuild)
    assert not late.take_answer(rebuild)


def test_ids_that_were_used_before_the_restart_are_known():
    old = Group(KEY)
    one = join(old, dynamic("a"))
    join(old, dynamic("b"))
    one.follow(old)
    old.remove("b", "left")
    one.follow(old)
    _, group = rebuilt([one])
    assert join(group, dynamic("c")).me.epoch == 1


def restarted(token):
    return Member(token, "restarted", -1, extra={RESTARTS: -1})


def test_workers_that_are_started_again_are_known():
    old = Group(KEY)
    one, two = join(old, dynamic("a")), join(old, restarted("b"))
    old.remove("b", "died", "it was killed")
    one.follow(old)
    _, group = rebuilt([one])
    (change,) = join(group, dynamic("c", 5)).restarting.values()
    assert (change.member, change.cause) == (two.me, "it was killed")
    again = join(group, restarted("b2"))
    assert (again.me.id, again.me.epoch) == (1, 1)
    assert not join(group, dynamic("d")).restarting


def test_one_that_was_started_again_before_the_restart_is_not_waited_for():
    old = Group(KEY)
    late, one = join(old, dynamic("a")), join(old, dynamic("b"))
    join(old, restarted("c"))
    old.remove("c", "died", "it was killed")
    late.follow(old)
    join(old, restarted("c2"))
    old.remove("c2", "left")
    one.follow(old)
    assert late.restarting and not one.restarting
    _, group = rebuilt([late, one])
    assert not join(group, dynamic("d")).restarting


def test_a_barrier_that_one_has_passed_is_passed_by_all():
    _, followers = static_group()
    followers[0].synced = {"join-0-0": {"w0": 1, "w1": 2, "w2": 3}}
    _, group = rebuilt(followers)
    session = group.sessions[0]
    assert session.reached("join-0-0") == {"w0": 1, "w1": 2, "w2": 3}
    assert session.reached("join-0-1") is None


def test_sessions_of_two_runs_stay_apart():
    group = Group(KEY)
    groups = []
    for run in range(2):
        for rank in range(2):
            member = Member(f"{run}-{rank}", f"w{rank}", rank, world_size=2)
            decisions = group.join(member)
        groups.append(followers_of(decisions))
        group.remove(f"{run}-0", "died")  # else the second is refused
        groups[-1][1].follow(group)
    _, group = rebuilt([each[1] for each in groups])
    assert [set(s.members) for s in group.sessions] == [{"0-1"}, {"1-1"}]
    assert group._count > 2


@pytest.mark.parametrize("seed", range(300))
def test_all_members_agree_after_any_history(seed):
    """Members join, leave, die and fall behind; some do not report, some report late."""
    some = random.Random(seed)
    share = seed % 3 / 3  # of guests
    group = Group(KEY)
    alive: dict[str, Follower] = {}
    removed: dict[str, Follower] = {}  # by the directory, though they may not know

    def step(number):
        if not alive or some.random() < 0.5:
            follower = join(group, dynamic(f"t{number}", guest=some.random() < share))
            alive[follower.me.token] = follower
        elif some.random() < 0.5:
            token = some.choice(list(alive))
            removed[token] = alive.pop(token)
            group.remove(token, some.choice(["left", "died"]))
        for each in alive.values():
            if some.random() < 0.5:
                each.follow(group)

    for number in range(some.randrange(1, 20)):
        step(number)
    for each in list(removed.values()):
        if some.random() < 0.5:
            del removed[each.me.token]  # it has ended
    everyone = [*alive.values(), *removed.values()]
    if not everyone:
        return
    some.shuffle(everyone)
    count = some.randrange(1, len(everyone) + 1)
    in_time, late = everyone[:count], everyone[count:]
    rebuild, group = rebuilt(in_time)
    late_ones = list(late)
    present = [each for each in in_time if each.take_answer(rebuild)]
    for number in range(100, 100 + some.randrange(10)):
        if some.random() < 0.5:
            present.append(join(group, dynamic(f"t{number}")))
        elif late:
            each = late.pop()
            each.restore(rebuild)
            if each.take_answer(rebuild):
                present.append(each)
    for each in late:
        each.restore(rebuild)
        if each.take_answer(rebuild):
            present.append(each)
    for token in {each.token for each in group.everyone()} - {each.me.token for each in present}:
        group.remove(token, "died")  # their endpoints have ended
    for each in present:
        each.follow(group)
        session = group.find(each.me.token)
        assert each.members == session.members and each.version == session.version
        ids = [member.id for member in session.members.values()]
        assert len(set(ids)) == len(ids)
    there = {each.me.token for each in present}
    for each in late_ones:  # they may have found their id taken, and only they
        alive.pop(each.me.token, None)
    assert there >= alive.keys()
