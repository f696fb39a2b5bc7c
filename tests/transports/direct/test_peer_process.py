"""The process at the other end of a UNIX socket."""

import os
import socket
import subprocess
import sys

import pytest
from conftest import eventually

from rayrpc._transports.direct.peer_process import has_ended, pid_of_peer

LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listening", flush=True)
connection, _ = listener.accept()
connection.sendall(b"accepted")
connection.recv(1)
"""


def test_a_peers_process_is_known_until_and_after_its_end():
    name = f"peer-process-{os.getpid()}"
    with (
        subprocess.Popen([sys.executable, "-c", LISTEN, name], stdout=subprocess.PIPE) as peer,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        assert peer.stdout is not None and peer.stdout.readline() == b"listening\n"
        connection.settimeout(30)
        connection.connect("\0" + name)
        pid = pid_of_peer(connection)
        assert pid == peer.pid and not has_ended(pid)
        assert connection.recv(20) == b"accepted"
        peer.kill()
        assert connection.recv(1) == b""
        assert eventually(lambda: has_ended(pid))  # a zombie
        peer.wait(30)
        assert has_ended(pid)


def test_a_peer_behind_tcp_is_not_known():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as connection:
            assert pid_of_peer(connection) is None


pytestmark = pytest.mark.skipif(
    not hasattr(socket, "SO_PEERCRED"), reason="the kernel does not tell the peer's process"
)
