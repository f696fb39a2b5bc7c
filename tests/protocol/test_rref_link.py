"""The sequence of RRef messages to and from a worker, whatever is lost, doubled or reordered."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import ChildAccept, ForkAck, ForkRequest
from rayrpc._protocol.rref_link import Link

RREF, FORK = GloballyUniqueId(1, 2), GloballyUniqueId(3, 4)


@pytest.fixture
def link():
    return Link()


class Interrupting(list):
    """Is interrupted just after each message is appended."""

    def append(self, message):
        super().append(message)
        raise KeyboardInterrupt


class TestSending:
    def test_messages_are_numbered_in_the_order_of_the_queue(self, link):
        link.enqueue(ForkAck, FORK)
        link.enqueue(ForkRequest, RREF, FORK)
        assert link.take() == (ForkAck(0, FORK), ForkRequest(1, RREF, FORK))
        link.enqueue(ChildAccept, FORK)
        assert link.take() == (ChildAccept(2, FORK),)

    def test_what_was_taken_is_in_flight_and_not_taken_again(self, link):
        link.enqueue(ForkAck, FORK)
        (message,) = link.take()
        assert link.take() == () and link.in_flight == {0: message}

    def test_a_message_that_was_queued_before_an_interrupt_keeps_its_number(self, link):
        link.queue = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            link.enqueue(ForkAck, FORK)
        link.queue = list(link.queue)  # the next ones are not interrupted
        link.enqueue(ForkRequest, RREF, FORK)
        assert [message.seq for message in link.take()] == [0, 1]
        link.enqueue(ForkAck, FORK)
        assert link.take()[0].seq == 2

    def test_so_it_does_if_it_was_taken_at_once(self, link):
        link.queue = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            link.enqueue(ForkAck, FORK)
        assert [message.seq for message in link.take()] == [0]
        link.enqueue(ForkRequest, RREF, FORK)
        assert [message.seq for message in link.take()] == [1]


def receive(link, seq):
    """Apply a message unless it is a duplicate; return whether it was applied."""
    if not link.is_new(seq):
        return False
    link.note(seq)
    return True


class TestReceiving:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_each_is_applied_once_in_whatever_order_they_come(self, link, order):
        assert [receive(link, seq) for seq in (*order, *order)] == [True] * 4 + [False] * 4
        assert link.next_expected == 4 and not link.out_of_order

    def test_nothing_above_a_gap_is_acknowledged(self, link):
        for seq in (0, 1, 3, 4):
            receive(link, seq)
        assert link.next_expected == 2 and link.out_of_order == {3, 4}
        receive(link, 2)
        assert link.next_expected == 5 and link.out_of_order == set()

    @pytest.mark.parametrize("seq", [0, 2])
    def test_a_duplicate_has_the_acknowledgement_sent_again(self, link, seq):
        for received in (0, 2):
            receive(link, received)
        link.ack_sent = 1
        assert not link.is_new(seq) and link.ack_sent == 0

    def test_a_new_one_does_not(self, link):
        link.ack_sent = 1
        assert link.is_new(0) and link.is_new(7) and link.ack_sent == 1

    def test_one_that_was_not_applied_is_still_new(self, link):
        assert link.is_new(0) and link.is_new(0)
        link.note(0)
        assert not link.is_new(0)

    @given(some.lists(some.integers(0, 12), max_size=40))
    def test_what_is_acknowledged_is_all_below_the_first_gap(self, received):
        link, applied = Link(), []
        for seq in received:
            if receive(link, seq):
                applied.append(seq)
        assert sorted(applied) == sorted(set(received))
        gaps = (number for number in itertools.count() if number not in applied)
        assert link.next_expected == next(gaps)
        assert link.out_of_order == {seq for seq in applied if seq > link.next_expected}
