"""Connections to hosts that do not answer, and connections that are made again; without Ray."""

import contextlib
import socket
import threading
import weakref
from types import SimpleNamespace

import pytest
from conftest import eventually
from direct_workers import WAIT_SECONDS, groups

from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct import silence, transport, unconnected_calls
from rayrpc._transports.direct.silence import SilenceWatch, keep_alive, silent_seconds
from rayrpc.errors import CallLostError, WorkerDiedError

FAR = ({"node": "127.0.0.2"}, {"node": "127.0.0.3"})


@pytest.fixture
def group(monkeypatch):
    """Make workers; connections are made again at once, and checked ten times a second."""
    monkeypatch.setattr(unconnected_calls, "LOSS_SECONDS", 0.2)
    monkeypatch.setattr(transport, "REOPEN_SECONDS", 0.1)
    monkeypatch.setattr(silence, "CHECKS", 100)
    with groups() as make:
        yield make


@pytest.fixture
def seconds(monkeypatch):
    """Set for how long all hosts have been silent."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(silence, "silent_seconds", lambda connection: state.now)
    return state


@pytest.fixture
def held(group):
    """Two workers on different nodes, and an event that the callee's functions wait for."""
    may_end = threading.Event()
    caller, callee = group(*FAR)

    def serve(frame, may_block=True):
        if frame.data == b"slow":
            may_end.wait(WAIT_SECONDS)
        return Frame(Kind.VALUE, 0, 1, frame.call_id, data=frame.data)

    callee.transport._server._serve = serve
    yield caller, callee
    may_end.set()


def call(caller, callee, data=b"x", call_id=1):
    return caller.call(callee, call_id, data).wait(WAIT_SECONDS).data


def goes_direct(caller, callee):
    before = len(caller.fallback.calls)
    return call(caller, callee) == b"x" and len(caller.fallback.calls) == before


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_host_that_acknowledges_is_not_silent(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is no address here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        keep_alive(client, 10.0)
        client.sendall(b"x")
        assert 0 <= silent_seconds(client) < WAIT_SECONDS
    assert silent_seconds(client) == 0  # closed


def test_connections_of_other_kinds_are_not_watched():
    one, other = socket.socketpair()
    watch = SilenceWatch(2.0, lambda: [])
    with one, other:
        watch.add(one)
        assert not watch._thread.is_running


class Connection:
    """One that is not open; it can be referenced weakly."""

    tcp = None


def test_a_watch_that_waits_keeps_no_connection_alive(monkeypatch):
    monkeypatch.setattr(silence, "CHECKS", 100)
    connections = [Connection()]
    is_alive = weakref.ref(connections[0])
    looks = threading.Semaphore(0)

    def look():
        looks.release()
        return list(connections)

    watch = SilenceWatch(1.0, look)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch.add(listener)
        assert looks.acquire(timeout=WAIT_SECONDS)
        connections.clear()
        assert eventually(lambda: is_alive() is None)
    watch.close()


def test_the_calls_of_a_silent_connection_fail(held, seconds):
    caller, callee = held
    assert call(caller, callee) == b"x"
    pending = caller.call(callee, 2, b"slow")
    assert eventually(lambda: callee.transport._server.connections)
    callee.transport._silence.close()  # else it may be the first to close the connection
    seconds.now = 11.0
    with pytest.raises(CallLostError, match="its host has not answered for 11 s"):
        pending.wait(WAIT_SECONDS)


def test_a_silence_that_ends_in_time_loses_nothing(held, seconds):
    caller, callee = held
    assert call(caller, callee) == b"x"
    seconds.now = 9.9
    assert not threading.Event().wait(0.5)
    assert goes_direct(caller, callee)


def test_a_connection_is_made_again_and_what_is_called_meanwhile_goes_by_the_fallback(
    held, seconds
):
    caller, callee = held
    assert call(caller, callee) == b"x"
    seconds.now = 11.0
    assert eventually(lambda: caller.transport.routes()[callee.token].reason)
    assert call(caller, callee, b"meanwhile") == b"meanwhile"
    seconds.now = 0.0
    assert eventually(lambda: goes_direct(caller, callee))
    assert caller.fallback.calls


def test_a_connection_that_breaks_is_made_again_when_the_peer_listens_again(group):
    caller, callee = group(*FAR)
    server = callee.transport._server
    assert call(caller, callee) == b"x"
    server._secret, secret = b"other", server._secret
    for connection in server.connections:
        connection.close()
    with contextlib.suppress(CallLostError):  # the first call finds it out
        call(caller, callee)
    assert eventually(lambda: caller.transport.routes()[callee.token].reason)
    assert call(caller, callee, b"meanwhile") == b"meanwhile"
    server._secret = secret
    assert eventually(lambda: goes_direct(caller, callee))


def test_a_member_that_was_lost_is_refused(group):
    caller, callee = group(*FAR)
    assert call(caller, callee) == b"x"
    callee.transport.on_peer_lost(caller.member, WorkerDiedError("w0", "silent"))
    assert eventually(lambda: not callee.transport._server.connections)
    with pytest.raises((OSError, EOFError)):
        caller.transport.connect(callee.member)
    with pytest.raises(CallLostError):
        call(caller, callee)
    assert callee.served == 1


def test_a_watch_whose_thread_could_not_start_starts_with_the_next_connection(unstartable, caplog):
    watch = SilenceWatch(10.0, lambda: [])
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(2)]
        unstartable.add("rayrpc-silence")
        watch.add(connections[0])
        assert "can't start new thread" in caplog.text and not watch._thread.is_running
        unstartable.clear()
        watch.add(connections[1])
        assert watch._thread.is_running
    watch.close()
