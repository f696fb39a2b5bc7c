"""Where the frames of a worker go."""

import pytest
from memory_workers import memory_group

from rayrpc._concurrency.outcome import Value
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import PendingReply
from rayrpc._runtime.router import Router
from rayrpc.errors import WorkerDiedError


@pytest.fixture
def group():
    with memory_group() as start:
        yield start("a"), start("b")


class Carrier:
    """A transport that keeps what it is to carry."""

    def __init__(self):
        self.sent = []

    def call(self, peer, frame):
        self.sent.append((peer.name, frame))
        return PendingReply()


@pytest.fixture
def carrier():
    return Carrier()


@pytest.fixture
def tasks():
    """What is to run in another thread."""
    return []


@pytest.fixture
def router(group, carrier, tasks):
    a, _ = group
    made = Router(a.agent.members, carrier, tasks.append)
    return made


def test_a_frame_to_a_peer_goes_by_the_transport(router, group, carrier, tasks):
    frame = Frame(Kind.CALL, 0, 0, 7)
    router.send(group[1].member, frame)
    assert carrier.sent == [("b", frame)] and tasks == []


def test_one_to_itself_is_served_in_another_thread_as_a_copy(router, group, carrier, tasks):
    buffer = bytearray(b"before")
    frame = Frame(Kind.CALL, 0, 0, 7, data=b"data", buffers=[buffer])
    seen = []

    def serve(frame, may_block=True):
        seen.append(frame)
        return Frame(Kind.VALUE, 0, 0, frame.call_id, data=frame.data)

    router.start(serve)
    pending = router.send(group[0].member, frame)
    assert carrier.sent == [] and frame.pending is pending and not pending.is_done
    buffer[:] = b"later!"
    tasks.pop()()
    assert isinstance(pending.value, Value) and pending.wait(0).data == b"data"
    assert bytes(seen[0].buffers[0]) == b"before"


def test_one_to_a_peer_that_is_gone_gets_the_error_why_and_is_not_sent(router, group, carrier):
    _, b = group
    b.die()
    frame = Frame(Kind.CALL, 0, 0, 7)
    with pytest.raises(WorkerDiedError, match=r"'b' .*killed by the test"):
        router.send(b.member, frame).wait(0)
    assert carrier.sent == [] and frame.pending.is_done
