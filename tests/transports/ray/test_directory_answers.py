"""How often a directory answers while nothing changes."""

import itertools

import pytest

from rayrpc._transports.ray.directory_answers import (
    LEAST_POLLS,
    POLLS,
    POLLS_A_SECOND,
    poll_seconds,
)


@pytest.mark.parametrize("peer_timeout", [0.5, 5.0, 30.0, 600.0])
def test_small_groups_poll_so_often_that_a_loss_is_noticed_in_time(peer_timeout):
    for members in (0, 1, 2, 10):
        if members / POLLS_A_SECOND <= peer_timeout / POLLS:
            assert poll_seconds(peer_timeout, members) == peer_timeout / POLLS


def test_a_large_group_polls_no_more_than_the_directory_can_answer():
    for members in (2000, 5000, 10_000):
        assert members / poll_seconds(600.0, members) <= POLLS_A_SECOND


@pytest.mark.parametrize("members", [1, 100, 10_000, 10**7])
def test_every_member_polls_often_enough_to_be_known_to_live(members):
    for peer_timeout in (0.5, 30.0):
        assert peer_timeout / poll_seconds(peer_timeout, members) >= LEAST_POLLS


def test_more_members_poll_no_more_often():
    seconds = [poll_seconds(30.0, members) for members in range(0, 20_000, 100)]
    assert all(before <= after for before, after in itertools.pairwise(seconds))


def test_members_of_large_groups_poll_less_often():
    """The rate is that of a few hundred, as long as silence is noticed in time."""
    assert [poll_seconds(10.0, members) for members in (1, 400, 800, 5000)] == [2.0, 2.0, 4.0, 5.0]
