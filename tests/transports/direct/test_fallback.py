"""The direct transport over a fallback in memory: what goes by which of them; without Ray."""

import logging
import os
import socket
import subprocess
import sys
import uuid

import pytest
from conftest import ROOT, eventually

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import PendingReply, Transport
from rayrpc._transports.direct import transport as direct
from rayrpc._transports.direct.address import DirectAddress
from rayrpc._transports.direct.transport import BULK_BYTES, DirectTransport
from rayrpc._transports.memory import MemoryHub, MemoryTransport
from rayrpc.errors import CallError, WorkerDiedError

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
    def __init__(self, hub, name, worker_id, node="127.0.0.1", only=False, is_direct=True):
        self.token = uuid.uuid4().hex[:12]
        self.fallback = CountingTransport(hub, f"memory-{name}", node)
        self.transport: Transport = self.fallback
        if is_direct:
            self.transport = DirectTransport(self.fallback, self.token, only=only)
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


@pytest.fixture
def group():
    """Make started workers from their options, a dict each."""
    made = []

    def make(*options):
        hub = MemoryHub()
        for number, option in enumerate(options):
            made.append(Worker(hub, f"w{number}", number, **option))
        members = {worker.member.id: worker.member for worker in made}
        for worker in made:
            worker.start(members)
        return made

    yield make
    for worker in made:
        worker.transport.close()


def route(caller, callee):
    return caller.transport._routes[callee.token]


def test_small_calls_within_a_node_use_its_unix_socket(group):
    caller, callee = group({}, {})
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [] and route(caller, callee).is_near


def test_small_calls_between_nodes_use_tcp_at_the_nodes_addresses(group):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [] and not route(caller, callee).is_near
    (listener,) = [s for s in callee.transport._server._listeners if s.family == socket.AF_INET]
    assert listener.getsockname()[0] == "127.0.0.3"


def test_large_requests_between_nodes_go_by_the_fallback(group):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    large = os.urandom(BULK_BYTES + 1)
    reply = caller.call(callee, 3, buffers=[large]).wait(WAIT_SECONDS)
    assert bytes(reply.buffers[0]) == large
    assert caller.fallback.calls == [("memory-w1", 3)]
    assert callee.fallback.replies == []  # it is the fallback's own reply


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "calls back"])
def test_large_replies_between_nodes_go_by_the_fallback(group, waits):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    large = os.urandom(BULK_BYTES + 1)
    callee.serve_small = callee.serve

    def serve(frame, may_block=True):
        reply = callee.serve_small(frame)
        reply.buffers = [large]
        return reply

    callee.transport._fallback._serve = serve
    callee.transport._server._serve = serve
    pending = caller.call(callee, 4)
    if waits:
        reply = pending.wait(WAIT_SECONDS)
    else:
        outcomes = []
        pending.on_done(outcomes.append)
        assert eventually(lambda: outcomes)
        reply = outcomes[0].unwrap()
    assert bytes(reply.buffers[0]) == large
    assert caller.fallback.calls == [] and callee.fallback.replies == [4]


def test_a_peer_without_connections_is_called_by_the_fallback(group, caplog):
    caplog.set_level(logging.INFO, direct.__name__)
    caller, callee = group({}, {"is_direct": False})
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [("memory-w1", 1)]
    (message,) = [r.getMessage() for r in caplog.records]
    assert "calls to w1 go by the memory transport: it accepts no connections" in message


def test_a_peer_that_refuses_connections_is_called_by_the_fallback(group):
    caller, callee = group({}, {})
    callee.transport._server._secret = b"other"
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [("memory-w1", 1)]
    assert "no connection could be made" in route(caller, callee).reason


def test_without_a_connection_calls_fail_where_only_direct_ones_are_allowed(group, monkeypatch):
    monkeypatch.setattr(direct, "LOSS_SECONDS", 0.2)
    caller, callee = group({"only": True}, {"is_direct": False})
    with pytest.raises(CallError, match=r"'w1'.*cannot be called directly.*memory transport"):
        caller.call(callee).wait(WAIT_SECONDS)
    del caller.members[1]
    with pytest.raises(WorkerDiedError):
        caller.call(callee).wait(WAIT_SECONDS)
    assert callee.served == 0


def test_the_loss_of_a_peer_ends_its_calls_on_both_transports(group):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    lost = PendingReply()
    caller.fallback.call = lambda peer, frame: lost
    caller.fallback.on_peer_lost = lambda peer, error: lost.complete(Error(error))
    caller.call(callee).wait(WAIT_SECONDS)
    caller.call(callee, 2, buffers=[bytes(BULK_BYTES + 1)])
    caller.transport.on_peer_lost(callee.member, WorkerDiedError("w1", "killed"))
    assert lost.is_done and callee.token not in caller.transport._routes


def test_an_address_leads_to_the_endpoint_of_its_fallback():
    class Fallback:
        def find(self):
            return "endpoint"

    assert DirectAddress(Fallback(), "n", "u", "h", 1).find() == "endpoint"


def test_addresses_load_neither_torch_nor_ray():
    code = (
        "import sys, rayrpc._transports.direct.address\n"
        "print(*({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr


@pytest.mark.process
def test_a_forked_child_closes_the_descriptors_of_its_parents_transport(group):
    caller, callee = group({}, {})
    caller.call(callee).wait(WAIT_SECONDS)
    listeners = callee.transport._server._listeners
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(listener.fileno() == -1 for listener in listeners) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert caller.call(callee, 2).wait(WAIT_SECONDS).data == b"x"
