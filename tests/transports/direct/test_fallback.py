"""The direct transport over a fallback in memory: what goes by which of them; without Ray."""

import logging
import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from direct_workers import WAIT_SECONDS, groups

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.transport import PendingReply
from rayrpc._transports.direct import transport as direct
from rayrpc._transports.direct.address import DirectAddress
from rayrpc.errors import CallError, WorkerDiedError


@pytest.fixture
def group():
    with groups() as make:
        yield make


def route(caller, callee):
    return caller.transport.routes()[callee.token]


def test_small_calls_within_a_node_use_its_unix_socket(group):
    caller, callee = group({}, {})
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [] and route(caller, callee).is_near


def test_small_calls_between_nodes_use_tcp_at_the_nodes_addresses(group):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
    assert caller.fallback.calls == [] and not route(caller, callee).is_near
    (listener,) = [s for s in callee.transport._server.listeners if s.family == socket.AF_INET]
    assert listener.getsockname()[0] == "127.0.0.3"


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


def test_the_loss_of_a_peer_ends_its_calls_on_both_transports(group):
    caller, callee = group({"node": "127.0.0.2"}, {"node": "127.0.0.3"})
    lost = PendingReply()
    caller.fallback.on_peer_lost = lambda peer, error: lost.complete(Error(error))
    caller.call(callee).wait(WAIT_SECONDS)
    caller.transport.on_peer_lost(callee.member, WorkerDiedError("w1", "killed"))
    assert lost.is_done and callee.token not in caller.transport.routes()


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
    listeners = callee.transport._server.listeners
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(listener.fileno() == -1 for listener in listeners) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert caller.call(callee, 2).wait(WAIT_SECONDS).data == b"x"


class TestNearOnly:
    """Where the network must be encrypted, connections stay on their node."""

    def test_calls_to_other_nodes_go_by_the_fallback(self, group):
        a, near, far = group(
            {"near_only": True}, {"near_only": True}, {"near_only": True, "node": "127.0.0.2"}
        )
        assert a.call(near, 1).wait(WAIT_SECONDS).data == b"x"
        assert a.call(far, 2).wait(WAIT_SECONDS).data == b"x"
        assert far.call(a, 3).wait(WAIT_SECONDS).data == b"x"
        assert [call_id for _, call_id in a.fallback.calls] == [2]
        assert [call_id for _, call_id in far.fallback.calls] == [3]

    def test_no_listener_is_on_the_network(self, group):
        a, b = group({"near_only": True}, {"node": "127.0.0.2"})
        assert [s.family for s in a.transport._server.listeners] == [socket.AF_UNIX]
        assert b.call(a, 1).wait(WAIT_SECONDS).data == b"x"  # also for peers that would connect
        assert [call_id for _, call_id in b.fallback.calls] == [1]

    def test_without_a_fallback_the_error_says_why(self, group):
        a, far = group({"near_only": True, "only": True}, {"node": "127.0.0.2"})
        with pytest.raises(CallError, match=r"'w1'.*RAY_USE_TLS is set.*cannot be used"):
            a.call(far).wait(WAIT_SECONDS)
        assert far.served == 0
