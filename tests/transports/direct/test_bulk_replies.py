"""Large replies: which connection of their peer they go by, without sockets."""

from typing import Any

from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.bulk_replies import BulkReplies


class Connection:
    """An end of a connection that records what is sent on it."""

    def __init__(self, number):
        self.pair = ("peer", number)
        self.is_closed = False
        self.sent = []

    def send_large(self, call_id, reply):
        self.sent.append(call_id)


def reply():
    return Frame(Kind.VALUE, 0, 1, 1, buffers=[b"large"])


def test_a_reply_waits_for_the_connection_of_its_own_pair():
    """That of an earlier pair may be lost, though its end is not noticed yet."""
    replies: Any = BulkReplies()
    earlier, source, later = Connection(1), Connection(2), Connection(2)
    replies.add(earlier)
    replies.send(source, 7, reply())
    assert not earlier.sent and not replies.is_empty
    replies.add(later)
    assert later.sent == [7] and not earlier.sent and replies.is_empty
    replies.send(source, 8, reply())
    assert later.sent == [7, 8]


def test_the_end_of_an_earlier_pair_leaves_the_replies_of_the_next_one():
    replies: Any = BulkReplies()
    first, second = Connection(1), Connection(2)
    replies.send(first, 7, reply())
    replies.send(second, 8, reply())
    replies.forget(first)
    bulk = Connection(2)
    replies.add(bulk)
    assert bulk.sent == [8] and replies.is_empty


def test_a_connection_that_has_ended_before_it_was_added_is_not_kept():
    replies: Any = BulkReplies()
    connection = Connection(1)
    connection.is_closed = True
    replies.add(connection)
    assert not replies._connections
