"""Both ends of connections in one process: a callee, and what a caller's connection needs."""

from __future__ import annotations

import os
import socket
import threading
import time

from rayrpc._concurrency.outcome import Value
from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred, PendingReply
from rayrpc._transports.direct.auth import CHALLENGE_SIZE, ClientHandshake
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.listening import listen
from rayrpc._transports.direct.server import DirectServer
from rayrpc._transports.direct.wire import message_parts, prepare
from rayrpc._transports.expected_replies import ExpectedReplies
from rayrpc.errors import CallLostError

__all__ = [
    "Callee",
    "Owner",
    "SECRET",
    "TOKEN",
    "WAIT_SECONDS",
    "authenticate",
    "dial",
    "end",
    "frame",
    "send_call",
]

SECRET = b"s" * 32
TOKEN = f"callee-{os.getpid()}"  # names a socket of this host
WAIT_SECONDS = 60.0


def frame(call_id, data=b"", buffers=()):
    return Frame(Kind.CALL, 0, 0, call_id, data=data, buffers=list(buffers))


class Callee:
    """Serves connections; what it answers can be set."""

    def __init__(self, token=TOKEN):
        self.threads = ThreadCache("callee", soft_limit=1000, idle_seconds=0.2)
        self.watchdog = ReaderWatchdog()
        self.server = DirectServer(token, listen("127.0.0.1"), self.threads, self.watchdog)
        self.answer = lambda frame: frame.data
        self.on_connected = lambda connection: None
        self.server.start(SECRET, self.serve, lambda connection: self.on_connected(connection))

    def serve(self, frame, may_block=True):
        data = self.answer(frame)
        if isinstance(data, (Deferred, Frame)):
            return data
        return Frame(Kind.VALUE, 0, 1, frame.call_id, data=data, buffers=frame.buffers)

    def close(self):
        self.server.flush_replies(0.5)
        self.server.close()
        self.watchdog.close()
        self.threads.close()


class Owner:
    """What a connection needs; connects by UNIX socket or TCP."""

    def __init__(self, callee, family, to=TOKEN):
        self.to = to
        self.callee = callee
        self.family = family
        self.rerouted = []
        self.lost = []
        self.connections = []
        self.elsewhere = ExpectedReplies(lambda worker_id: Member(self.to, "callee", worker_id))

    def connect(self, peer, is_bulk=False, pair=0):
        connection = dial(self.callee.server, self.family)
        authenticate(connection, to=self.to, is_bulk=is_bulk, pair=pair)
        prepare(connection)
        self.connections.append(connection)
        return connection

    def reroute(self, peer, request, reason):
        self.rerouted.append(request)
        pending = PendingReply()
        pending.complete(Value(frame(request.call_id, b"rerouted")))
        return pending

    def on_connection_lost(self, connection, reason):
        self.lost.append(reason)
        threading.Timer(0.3, lambda: connection.fail(CallLostError(f"not known: {reason}"))).start()

    def expect_large(self, connection, call_id):
        if connection.bulk is None:
            threads, watchdog = connection._threads, connection._watchdog
            bulk = CallerConnection(connection.peer, self, threads, watchdog, is_bulk=True)
            connection.bulk = bulk
        return connection.bulk.expect(call_id)

    def expect_reply(self, call_id, peer):
        return self.elsewhere.expect(call_id, peer)


def end(connection):
    """End a caller's connection, and the one for large messages beside it."""
    for each in (connection.bulk, connection):
        if each is not None:
            each.fail(CallLostError("the test is over"))


def dial(server, family=socket.AF_UNIX):
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(WAIT_SECONDS)
    address = "\0" + server.unix if family == socket.AF_UNIX else ("127.0.0.1", server.port)
    while True:
        try:
            connection.connect(address)
            return connection
        except BlockingIOError:  # the listener's queue is full
            time.sleep(0.01)


def authenticate(connection, secret=SECRET, to=TOKEN, is_bulk=False, pair=0):
    handshake = ClientHandshake(secret, "caller", to, is_bulk, pair)
    connection.sendall(handshake.hello)
    challenge = b""
    while len(challenge) < CHALLENGE_SIZE:
        data = connection.recv(CHALLENGE_SIZE - len(challenge))
        assert data, "refused"
        challenge += data
    connection.sendall(handshake.receive(challenge))


def send_call(connection):
    """Send a call of a few bytes on an authenticated connection."""
    connection.sendall(message_parts(1, frame(1, b"x").pack(), [])[0])
