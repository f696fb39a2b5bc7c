"""Connecting to a peer: attempts, a full queue of the listener, and what a failure leaves."""

import socket
import threading

import pytest

from rayrpc._transports.direct import dialing
from rayrpc._transports.direct.address import DirectAddress
from rayrpc._transports.direct.auth import AuthenticationError, ClientHandshake, ServerHandshake
from rayrpc._transports.direct.dialing import CONNECT_TRIES, dial

SECRET = b"s" * 32
WAIT_SECONDS = 60.0


class Listener:
    """Accepts connections one after the other, each as its step says."""

    def __init__(self, is_near, backlog=16):
        family = socket.AF_UNIX if is_near else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_SECONDS)
        self.socket.bind("" if is_near else ("127.0.0.1", 0))  # "": a name by the system
        self.socket.listen(backlog)
        name = self.socket.getsockname()
        unix, port = (name.decode()[1:], 0) if is_near else ("", name[1])
        self.address = DirectAddress(None, "here", unix, "127.0.0.1", port)
        self.is_near = is_near
        self.handshakes = []
        self.errors = []
        self._thread = None

    def serve(self, *steps):
        """Run each step with a connection, and close it."""
        self._thread = threading.Thread(target=self._serve, args=(steps,))
        self._thread.start()

    def _serve(self, steps):
        for step in steps:
            connection, _ = self.socket.accept()
            with connection:
                connection.settimeout(WAIT_SECONDS)
                try:
                    step(connection)
                except Exception as exc:
                    self.errors.append(exc)

    def dial(self, secret=SECRET):
        def new_handshake():
            self.handshakes.append(ClientHandshake(secret, "alice", "bob"))
            return self.handshakes[-1]

        return dial(self.address, self.is_near, new_handshake, None)

    def close(self):
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
            assert not self._thread.is_alive()
        self.socket.close()


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def listener(request):
    listener = Listener(request.param)
    yield listener
    listener.close()


@pytest.fixture
def near():
    """A listener whose queue is full."""
    listener = Listener(is_near=True, backlog=0)
    yield listener
    listener.close()


def authenticate(connection):
    """Prove the secret, in pieces, then answer a byte."""
    callee = ServerHandshake(SECRET, "bob")
    while not callee.done:
        answer = callee.receive(connection.recv(min(7, callee.missing)))
        for position in range(0, len(answer), 30):
            connection.sendall(answer[position : position + 30])
    connection.sendall(connection.recv(1) + b"!")


def refuse(connection):
    assert connection.recv(200)


def read_to_the_end(connection):
    """Send a challenge, and see how the caller ends the connection."""
    assert connection.recv(200)
    connection.sendall(bytes(64))
    assert connection.recv(200) == b""


def test_a_connection_is_authenticated_and_open(listener):
    listener.serve(authenticate)
    with listener.dial() as connection:
        connection.setblocking(True)
        connection.sendall(b"x")
        assert connection.recv(10, socket.MSG_WAITALL)[:2] == b"x!"
    assert len(listener.handshakes) == 1 and not listener.errors


def test_a_peer_that_closes_connections_is_tried_again_with_new_handshakes(listener):
    listener.serve(refuse, refuse, authenticate)
    with listener.dial() as connection:
        connection.setblocking(True)
        connection.sendall(b"x")
    assert len({handshake.hello for handshake in listener.handshakes}) == 3


def test_after_the_last_try_the_error_is_that_of_the_peer(listener):
    listener.serve(*[refuse] * CONNECT_TRIES)
    with pytest.raises((EOFError, ConnectionError)):
        listener.dial()
    assert len(listener.handshakes) == CONNECT_TRIES


def test_a_peer_without_the_secret_is_refused_and_its_connection_closed(listener):
    listener.serve(*[read_to_the_end] * CONNECT_TRIES)
    with pytest.raises(AuthenticationError, match="the callee does not know the group's secret"):
        listener.dial()
    listener.close()
    assert len(listener.handshakes) == CONNECT_TRIES and not listener.errors


def test_a_port_that_nobody_listens_at_is_tried_again(listener):
    listener.socket.close()
    with pytest.raises(ConnectionRefusedError):
        listener.dial()
    assert len(listener.handshakes) == CONNECT_TRIES


def test_an_interrupt_closes_the_connection(listener):
    class Interrupted(ClientHandshake):
        def receive(self, challenge):
            raise KeyboardInterrupt

    listener.serve(read_to_the_end)
    with pytest.raises(KeyboardInterrupt):
        dial(listener.address, listener.is_near, lambda: Interrupted(SECRET, "alice", "bob"), None)
    listener.close()
    assert not listener.errors


def test_no_try_follows_once_the_time_is_over(listener, monkeypatch):
    monkeypatch.setattr(dialing, "CONNECT_SECONDS", 0.0)
    listener.socket.close()
    with pytest.raises(ConnectionRefusedError):
        listener.dial()
    assert len(listener.handshakes) == 1


class TestFullQueue:
    """A UNIX socket refuses connections while its listener's queue is full."""

    @pytest.fixture
    def queued(self, near):
        """A connection in the queue, which has place for one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as queued:
            queued.settimeout(WAIT_SECONDS)
            queued.connect("\0" + near.address.unix)
            yield queued

    def test_it_is_waited_for_and_is_no_try(self, near, queued):
        dialed = []
        thread = threading.Thread(target=lambda: dialed.append(near.dial()))
        thread.start()
        while len(near.handshakes) <= CONNECT_TRIES + 1:
            assert thread.is_alive()
            thread.join(0.01)
        near.serve(lambda connection: None, authenticate)
        thread.join(WAIT_SECONDS)
        (connection,) = dialed
        with connection:
            connection.setblocking(True)
            connection.sendall(b"x")

    def test_it_is_waited_for_until_the_time_is_over(self, near, queued, monkeypatch):
        monkeypatch.setattr(dialing, "CONNECT_SECONDS", 0.05)
        with pytest.raises(BlockingIOError):
            near.dial()
