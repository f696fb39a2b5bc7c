"""Joins that wait for the missing ranks of a static group."""

import pytest

from rayrpc._protocol.membership import Member
from rayrpc._protocol.origin import Origin
from rayrpc._protocol.pending_joins import PendingJoins


def join(run, rank, launched):
    return Member(f"{run}-{rank}", "w", rank, 4, origin=Origin(run=run, launched=launched))


OF_RUN = [join("a", 0, True), join("a", 1, True)]
BY_HAND = [join("b", 0, False), join("c", 3, False)]
OF_NO_RUN = join("", 2, True)


@pytest.fixture
def pending():
    made = PendingJoins()
    for each in (*OF_RUN, *BY_HAND, OF_NO_RUN):
        made.add(each)
    return made


def belonging_with(pending, one):
    return [list(joins.values()) for joins in pending.belonging_with(one)]


def test_joins_belong_together_by_their_run_or_by_hand(pending):
    assert belonging_with(pending, join("a", 2, True)) == [OF_RUN]
    assert belonging_with(pending, join("a", 2, False)) == [OF_RUN, BY_HAND]
    assert belonging_with(pending, BY_HAND[0]) == [BY_HAND[:1], BY_HAND]
    assert belonging_with(pending, join("d", 2, True)) == [[]]
    assert belonging_with(pending, OF_NO_RUN) == []


def test_a_join_that_is_removed_is_nowhere(pending):
    assert pending.remove(BY_HAND[0].token) and not pending.remove(BY_HAND[0].token)
    assert BY_HAND[0].token not in pending and pending.get(BY_HAND[0].token) is None
    assert belonging_with(pending, BY_HAND[0]) == [[], BY_HAND[1:]]
    assert list(pending) == [*OF_RUN, BY_HAND[1], OF_NO_RUN] and len(pending) == 4


def test_nothing_is_left_of_those_that_are_removed(pending):
    for each in list(pending):
        pending.remove(each.token)
    assert not pending and not pending._together
