"""The sequence of RRef messages between this worker and another."""

from __future__ import annotations

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Control

__all__ = ["Link"]


class Link:
    """Sequence numbers and unacknowledged messages between this worker and another.

    An interrupt, such as Ctrl-C, may strike between any two instructions: then a message is sent or
    applied twice, never lost.
    """

    __slots__ = (
        "ack_sent",
        "in_flight",
        "next_expected",
        "next_seq",
        "out_of_order",
        "queue",
        "retransmit_below",
    )

    def __init__(self) -> None:
        self.next_seq = 0  # of the next message to send
        self.queue: list[Control] = []
        self.in_flight: dict[int, Control] = {}  # sent, but not acknowledged
        self.retransmit_below = 0  # what is in flight below was so at the previous retransmit
        self.next_expected = 0  # every number below was received
        self.ack_sent = 0  # the last acknowledgement; 0 to send it again
        self.out_of_order: set[int] = set()  # received above ``next_expected``

    def is_new(self, seq: int) -> bool:
        """Tell whether a received message is no duplicate; ``note`` it once it is applied."""
        if seq < self.next_expected or seq in self.out_of_order:
            self.ack_sent = 0  # the sender may have missed the acknowledgement
            self._advance()
            return False
        return True

    def note(self, seq: int) -> None:
        """Record the number of a message that was applied."""
        self.out_of_order.add(seq)
        self._advance()

    def _advance(self) -> None:
        while (seq := self.next_expected) in self.out_of_order:
            self.next_expected = seq + 1
            self.out_of_order.discard(seq)

    def enqueue(self, message: type[Control], *ids: GloballyUniqueId) -> None:
        """Queue a message to send."""
        seq = self.next_seq
        if self.queue and self.queue[-1].seq == seq:  # an interrupt came before it was counted
            seq += 1
        self.queue.append(message(seq, *ids))
        self.next_seq = seq + 1

    def take(self) -> tuple[Control, ...]:
        """Return the queued messages, which are sent now."""
        messages = tuple(self.queue)
        for message in messages:
            self.in_flight[message.seq] = message
            self.next_seq = max(self.next_seq, message.seq + 1)
        self.queue = []  # an interrupt before has them sent once more
        return messages
