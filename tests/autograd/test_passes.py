"""Which part of a pass gradients and aborts are for, also those that come before its start."""

import threading

import pytest

from rayrpc._autograd.passes import Passes
from rayrpc.errors import RpcError

ABORT = RpcError("it failed elsewhere")


class Part:
    """A part that keeps why it failed."""

    def __init__(self):
        self.errors = []

    def fail(self, error):
        self.errors.append(error)
        return True

    def process_request(self, gradients, source):
        raise AssertionError

    def on_peer_lost(self, worker, error):
        raise AssertionError


@pytest.fixture
def passes():
    return Passes()


@pytest.fixture
def part():
    return Part()


def test_gradients_that_overtake_the_start_of_a_part_are_kept_for_it(passes, part):
    assert passes.find(9, {5: [None]}) is None
    assert passes.find(9, {6: [None]}) is None
    assert passes.find(8, {7: [None]}) is None
    assert passes.add(9, part) == {5: [None], 6: [None]}
    assert passes.find(9, {7: [None]}) is part


def test_an_abort_fails_a_part_at_once(passes, part):
    passes.add(9, part)
    passes.abort(8, ABORT)
    assert part.errors == []
    passes.abort(9, ABORT)
    assert part.errors == [ABORT]


def test_one_that_overtakes_the_start_fails_the_part_when_that_comes(passes, part):
    passes.abort(9, ABORT)
    passes.add(9, part)
    assert part.errors == [ABORT]


def test_a_part_that_has_ended_is_not_found(passes, part):
    passes.add(9, part)
    assert passes.under_way() == [part] and len(passes) == 1
    passes.remove(9)
    passes.remove(9)
    assert passes.under_way() == [] and not passes
    assert passes.find(9, {}) is None


def test_gradients_that_arrive_after_the_end_are_not_kept(passes, part):
    passes.add(9, part)
    passes.remove(9)
    assert passes.find(9, {5: [None]}) is None
    assert passes.add(9, part) == {}


def test_neither_is_an_abort(passes, part):
    passes.add(9, part)
    passes.abort(9, ABORT)
    passes.remove(9)
    passes.abort(9, ABORT)
    later = Part()
    passes.add(9, later)
    assert later.errors == []


def test_a_part_may_be_removed_while_it_fails(passes):
    class Removed(Part):
        def fail(self, error):
            passes.remove(9)
            return super().fail(error)

    part = Removed()
    passes.abort(9, ABORT)
    passes.add(9, part)
    assert part.errors == [ABORT] and not passes


@pytest.mark.timeout(60)
def test_an_abort_and_a_start_at_the_same_time_fail_the_part(passes):
    for number in range(200):
        part, barrier = Part(), threading.Barrier(2)

        def abort(number=number, barrier=barrier):
            barrier.wait(30)
            passes.abort(number, ABORT)

        thread = threading.Thread(target=abort)
        thread.start()
        barrier.wait(30)
        passes.add(number, part)
        thread.join(30)
        assert set(part.errors) == {ABORT}
