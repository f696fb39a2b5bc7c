"""The sequence of RRef messages between this worker and another."""

from __future__ import annotations

from rayrpc._protocol.messages import Control

__all__ = ["Link"]


class Link:
    """Sequence numbers and unacknowledged messages between this worker and another."""

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
        """Record the number of a received message; return False for a duplicate."""
        if seq < self.next_expected or seq in self.out_of_order:
            self.ack_sent = 0  # the sender may have missed the acknowledgement
            return False
        self.out_of_order.add(seq)
        while self.next_expected in self.out_of_order:
            self.out_of_order.remove(self.next_expected)
            self.next_expected += 1
        return True
