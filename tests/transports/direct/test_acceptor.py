"""The acceptor of connections: no error ends it, only the connection that it is about."""

import logging
import socket
import threading
import time

import pytest
from conftest import eventually
from direct_ends import WAIT_SECONDS, authenticate, dial, send_call
from limits import no_descriptors

from rayrpc._transports.direct import acceptor as acceptor_module
from rayrpc._transports.direct import server as server_module
from rayrpc._transports.direct.auth import ServerHandshake
from rayrpc._transports.direct.server_connection import ServerConnection


def fail_once(original):
    """Return a function that raises at its first call."""
    failed = threading.Event()

    def fails(*args):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        return original(*args)

    return fails


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.WARNING, "rayrpc")


def tcp_call(callee, connection=None):
    with connection or dial(callee.server, socket.AF_INET) as connection:
        authenticate(connection)
        send_call(connection)
        assert connection.recv(1) != b""


def test_a_connection_that_cannot_be_served_is_closed_and_the_next_is_served(
    callee, monkeypatch, caplog
):
    monkeypatch.setattr(server_module, "ServerConnection", fail_once(ServerConnection))
    with dial(callee.server, socket.AF_INET) as unlucky:
        authenticate(unlucky)
        assert unlucky.recv(1) == b""
    tcp_call(callee)
    assert "could not serve a connection" in caplog.text


def test_a_connection_that_cannot_begin_is_closed_and_the_next_is_served(
    callee, monkeypatch, caplog
):
    monkeypatch.setattr(server_module, "ServerHandshake", fail_once(ServerHandshake))
    with dial(callee.server, socket.AF_INET) as unlucky:
        assert unlucky.recv(1) == b""
    tcp_call(callee)
    assert "could not accept a connection" in caplog.text


def test_an_error_of_the_acceptor_itself_does_not_end_it(callee, monkeypatch, caplog):
    acceptor = callee.server._acceptor
    monkeypatch.setattr(acceptor, "_set_listening", fail_once(acceptor._set_listening))
    acceptor._wakeup.send(b"x")  # it never reads it, and runs again and again
    tcp_call(callee)
    assert eventually(lambda: "the acceptor goes on" in caplog.text)
    acceptor._woken.recv(1)


def test_without_descriptors_peers_wait_and_are_accepted_when_there_are_some(callee, caplog):
    tcp_call(callee)
    waiting = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(3)]
    with no_descriptors():
        for each in waiting:
            each.settimeout(WAIT_SECONDS)
            each.connect(("127.0.0.1", callee.server.port))
        assert eventually(lambda: "could not accept a connection" in caplog.text)
        time.sleep(0.5)  # for some fifty tries
    for each in waiting:
        tcp_call(callee, each)
    # once, but for descriptors that other threads close meanwhile
    assert caplog.text.count("could not accept a connection") < 5


def test_handshakes_that_take_too_long_are_closed(callee, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 0.05)
    with dial(callee.server, socket.AF_INET) as idle:
        assert idle.recv(1) == b""
    tcp_call(callee)
