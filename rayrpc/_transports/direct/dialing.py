"""Connect to a peer, and authenticate."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._transports.direct.address import DirectAddress
from rayrpc._transports.direct.auth import CHALLENGE_SIZE, AuthenticationError, ClientHandshake
from rayrpc._transports.direct.tls import Tls
from rayrpc._transports.direct.wire import prepare

__all__ = ["dial"]

# How long connecting to a peer may take, and how often it is tried.
CONNECT_SECONDS = 5.0
CONNECT_TRIES = 3
RETRY_SECONDS = 0.02


def dial(
    to: DirectAddress,
    is_near: bool,
    new_handshake: Callable[[], ClientHandshake],
    tls: Tls | None,
) -> socket.socket:
    """Return an authenticated connection to a peer.

    Args:
        to: the peer's address.
        is_near: connect to the peer's UNIX socket.
        new_handshake: returns a new handshake, for each attempt.
        tls: encrypts connections to other nodes; None: they are not encrypted.

    Raises:
        OSError: the peer cannot be reached.
        EOFError: the peer closed the connection.
        AuthenticationError: the callee is not the peer.
    """
    deadline = Deadline(CONNECT_SECONDS)
    tries = 0
    while True:
        try:
            return _dial_once(to, is_near, new_handshake(), tls, deadline)
        except BlockingIOError:  # the listener's queue is full
            if deadline.expired:
                raise
        except (OSError, EOFError, AuthenticationError):
            tries += 1
            if tries == CONNECT_TRIES or deadline.expired:
                raise
        time.sleep(RETRY_SECONDS)


def _dial_once(
    to: DirectAddress,
    is_near: bool,
    handshake: ClientHandshake,
    tls: Tls | None,
    deadline: Deadline,
) -> socket.socket:
    if is_near:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection((to.host, to.port), _left(deadline))
    try:
        if is_near:
            connection.settimeout(_left(deadline))
            connection.connect("\0" + to.unix)
        elif tls is not None:
            connection = tls.of_client(connection, to.host)
            connection.shake_hands()
        connection.sendall(handshake.hello)
        challenge = b""
        while len(challenge) < CHALLENGE_SIZE:
            data = connection.recv(CHALLENGE_SIZE - len(challenge))
            if not data:
                raise EOFError("the peer closed the connection")
            challenge += data
        connection.sendall(handshake.receive(challenge))
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _left(deadline: Deadline) -> float:
    """Return the seconds that are left; not 0, with which a socket would never wait."""
    return max(0.001, deadline.within(CONNECT_SECONDS))
