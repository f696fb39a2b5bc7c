"""Workers on the direct transport over a fallback in memory, in one process."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Transport
from rayrpc._transports.direct.transport import DirectTransport
from rayrpc._transports.memory import MemoryHub, MemoryTransport

__all__ = [
    "CountingTransport",
    "WAIT_SECONDS",
    "Worker",
    "connections",
    "groups",
    "refuse_bulk",
    "replies_with",
    "served_by",
]

WAIT_SECONDS = 60.0


class CountingTransport(MemoryTransport):
    """A fallback that records what it carries."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.replies = [], []

    def call(self, peer, frame):
        self.calls.append((peer.address, frame.call_id))
        return super().call(peer, frame)

    def send_reply(self, request, reply):
        self.replies.append(request.call_id)
        super().send_reply(request, reply)


class Worker:
    def __init__(self, hub, name, worker_id, node="127.0.0.1", is_direct=True, **options):
        self.token = uuid.uuid4().hex[:12]
        self.fallback = CountingTransport(hub, f"memory-{name}", node)
        self.transport: Transport = self.fallback
        if is_direct:
            self.transport = DirectTransport(self.fallback, self.token, **options)
        self.member = Member(self.token, name, worker_id, address=self.transport.address, node=node)
        self.members = {}
        self.served = 0

    def start(self, members):
        self.members = members
        self.transport.start(self.serve, members.get, b"secret")

    def serve(self, frame, may_block=True):
        self.served += 1
        return Frame(
            Kind.VALUE, 0, self.member.id, frame.call_id, data=frame.data, buffers=frame.buffers
        )

    def call(self, peer, call_id=1, data=b"x", buffers=()):
        frame = Frame(Kind.CALL, 0, self.member.id, call_id, data=data, buffers=list(buffers))
        return self.transport.call(peer.member, frame)


@contextlib.contextmanager
def groups() -> Iterator[Callable[..., list[Worker]]]:
    """Return a function that makes started workers from their options, a dict each."""
    made: list[Worker] = []

    def make(*options):
        hub = MemoryHub()
        for number, option in enumerate(options):
            made.append(Worker(hub, f"w{number}", number, **option))
        members = {worker.member.id: worker.member for worker in made}
        for worker in made:
            worker.start(members)
        return made

    try:
        yield make
    finally:
        for worker in made:
            worker.transport.close()


def replies_with(callee, make_buffers):
    """Have a callee reply with buffers."""
    serve = callee.serve

    def with_buffers(frame, may_block=True):
        reply = serve(frame)
        reply.buffers = make_buffers(frame)
        return reply

    callee.transport._server._serve = with_buffers


def connections(caller, callee):
    """Return the connection of a caller to a callee, and that for large messages."""
    connection = caller.transport.routes()[callee.token].connection
    return connection, connection.bulk


def served_by(callee):
    """Return the callee's ends: of small messages, and of large ones."""
    ends = callee.transport._server.connections
    return [each for each in ends if each._bulk], [each for each in ends if not each._bulk]


def refuse_bulk(caller, times):
    """Have connections for large messages fail, so many times; return when they were tried."""
    began: list[float] = []
    connect = caller.transport.connect

    def refuse(peer, is_bulk=False, pair=0):
        if is_bulk:
            began.append(time.monotonic())
            if len(began) <= times:
                raise OSError("refused by the test")
        return connect(peer, is_bulk, pair)

    caller.transport.connect = refuse
    return began
