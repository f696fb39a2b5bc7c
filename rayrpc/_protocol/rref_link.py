"""The sequences of RRef messages between this worker and the others."""

from __future__ import annotations

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Control

__all__ = ["Link", "Links"]


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


class Links:
    """Hold a worker's links to the others, but for those that left or died.

    Not thread-safe, unless a method says so.
    """

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._links: dict[int, Link] = {}

    def on_peer_joined(self, worker: int) -> None:
        """Exchange messages with this worker id (again)."""
        self._lost.discard(worker)

    def has_nothing_pending(self, worker: int) -> bool:
        """Tell whether the next frame to ``worker`` needs no ack or message; thread-safe."""
        link = self._links.get(worker)
        return link is None or (link.ack_sent == link.next_expected and not link.queue)

    def take_pending(self, worker: int) -> tuple[int, tuple[Control, ...]]:
        """Return the ack (0: none) and the messages that the next frame to ``worker`` carries."""
        link = self._links.get(worker)
        if link is None:
            return 0, ()
        ack = 0 if link.ack_sent == link.next_expected else link.next_expected
        link.ack_sent = link.next_expected
        return ack, link.take() if link.queue else ()

    def pending_workers(self) -> list[int]:
        """Return the workers for which messages are queued."""
        return [worker for worker, link in self._links.items() if link.queue]

    def retransmit(self, worker: int | None = None) -> None:
        """Queue unacknowledged messages again.

        Args:
            worker: all messages to this one, as a frame to it was lost. None: of every worker, the
                messages that were in flight at the previous such call; make it at a fixed rate.
        """
        for number, link in self._links.items():
            if worker is None:
                unacked = [m for seq, m in link.in_flight.items() if seq < link.retransmit_below]
                link.retransmit_below = link.next_seq
            elif number == worker:
                unacked = list(link.in_flight.values())
            else:
                continue
            for message in unacked:
                del link.in_flight[message.seq]
            link.queue += unacked

    def is_settled(self) -> bool:
        """Tell whether no message is queued or unacknowledged."""
        return not any(link.queue or link.in_flight for link in self._links.values())

    def _link(self, worker: int) -> Link:
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = Link()
        return link

    def _enqueue(self, worker: int, message: type[Control], *ids: GloballyUniqueId) -> None:
        if worker not in self._lost:
            self._link(worker).enqueue(message, *ids)
