"""Who started a process, and how that is told."""

import pickle

import pytest

from rayrpc._protocol.origin import Origin

ORIGIN = Origin("ann", "host1", "loopback", "/home/ann/train.py", 17, "run", True, 4, 0)


def test_one_that_is_not_known_says_so():
    assert str(Origin()) == "an unknown program"
    assert str(ORIGIN._replace(user="")) == "an unknown program"


def test_one_that_is_known_is_told_with_what_helps_to_find_it():
    assert str(ORIGIN) == "user 'ann', program '/home/ann/train.py', host 'host1', pid 17"


@pytest.mark.parametrize(
    ("launched", "started", "is_by_hand"),
    [(False, 0, True), (False, 2, False), (True, 0, False), (True, 2, False)],
)
def test_by_hand_is_what_no_program_started_and_has_started_none(launched, started, is_by_hand):
    assert ORIGIN._replace(launched=launched, started=started).is_by_hand is is_by_hand


def test_a_process_is_by_hand_and_alone_unless_it_is_known_better():
    assert Origin().is_by_hand and Origin().ranks == 1


def test_it_travels_as_what_it_is():
    assert pickle.loads(pickle.dumps(ORIGIN)) == ORIGIN
