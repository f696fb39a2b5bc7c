"""Replies that come apart from their calls."""

import pytest

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.expected_replies import KEEP_SECONDS, ExpectedReplies
from rayrpc.errors import WorkerDiedError

PEER = Member("token", "b", 1)
REPLY = Frame(Kind.VALUE, 0, 1, 7)


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def replies(now):
    return ExpectedReplies(lambda worker_id: PEER, lambda: now[0])


def test_a_reply_completes_its_call_whichever_comes_first(replies):
    expected = replies.expect(7, PEER)
    assert not expected.is_done
    replies.on_reply(7, REPLY)
    assert expected.value == Value(REPLY)
    replies.on_reply(8, REPLY)
    assert replies.expect(8, PEER).value == Value(REPLY)


def test_a_reply_that_comes_twice_counts_once(replies):
    replies.on_reply(7, REPLY)
    replies.on_reply(7, REPLY)
    assert replies.expect(7, PEER).value == Value(REPLY)
    assert not replies.expect(7, PEER).is_done


def test_a_reply_whose_announcement_never_comes_is_not_kept(replies, now):
    replies.on_reply(7, REPLY)
    now[0] += KEEP_SECONDS + 1
    replies.on_reply(8, REPLY)
    assert len(replies._replies) == len(replies._early) == 1
    assert not replies.expect(7, PEER).is_done
    assert replies.expect(8, PEER).is_done


def test_the_calls_of_a_lost_peer_fail_and_no_reply_is_kept(replies):
    expected = replies.expect(7, PEER)
    replies.on_reply(8, REPLY)
    replies.fail(WorkerDiedError("b", "it was killed", "here"), token="token")
    assert isinstance(expected.value, Error)
    replies.fail(ConnectionError())
    assert not replies._replies and not replies._early


def test_a_call_of_a_peer_that_is_lost_already_fails():
    replies = ExpectedReplies(lambda worker_id: None)
    assert isinstance(replies.expect(7, PEER).value, Error)
