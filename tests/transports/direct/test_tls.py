"""Encrypted connections: the socket, and the direct transport on it; without Ray."""

import logging
import os
import socket
import ssl
import threading

import pytest
import trustme
from certificates import write_certificate
from direct_ends import WAIT_SECONDS
from direct_workers import groups

from rayrpc._transports.direct.tls import tls_of_ray
from rayrpc.errors import CallError


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path):
    """Write an authority's certificates for hosts; return Ray's variables that name them."""

    def write(authority, *hosts, name="node"):
        hosts = hosts or ("127.0.0.1", "127.0.0.2")
        return write_certificate(authority, tmp_path, *hosts, name=name)

    return write


@pytest.fixture
def tls(authority, files):
    found = tls_of_ray(files(authority))[1]
    assert found is not None
    return found


@pytest.fixture
def pair():
    """Return both ends of an encrypted connection; the client's handshake runs in a thread."""
    ends = []

    def make(of_client, of_server, host="127.0.0.1"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connection = socket.create_connection(listener.getsockname(), WAIT_SECONDS)
            accepted, _ = listener.accept()
        accepted.settimeout(WAIT_SECONDS)
        client, server = of_client.of_client(connection, host), of_server.of_server(accepted)
        ends.extend([client, server])
        errors = []

        def serve():
            try:
                server.shake_hands()
            except OSError as exc:
                errors.append(exc)
                server.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client.shake_hands()
            thread.join(WAIT_SECONDS)
            if errors:
                raise errors[0]
        finally:
            thread.join(WAIT_SECONDS)
        return client, server

    yield make
    for end in ends:
        end.close()


@pytest.fixture
def group():
    with groups() as make:
        yield make


class TestSocket:
    def test_bytes_arrive_whole_and_in_order_in_both_directions_at_once(
        self, tls, pair, quick_switches
    ):
        ends = pair(tls, tls)
        data = [os.urandom(3_000_000), os.urandom(3_000_000)]
        received = [bytearray(), bytearray()]

        def send(number):
            for start in range(0, 3_000_000, 70_000):
                ends[number].sendall(data[number][start : start + 70_000])

        def receive(number):
            buffer = bytearray(50_000)
            while len(received[number]) < 3_000_000:
                count = ends[number].recv_into(buffer)
                assert count
                received[number] += buffer[:count]

        threads = [threading.Thread(target=f, args=(n,)) for f in (send, receive) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert received[0] == data[1] and received[1] == data[0]

    @pytest.mark.parametrize("timeout", [None, WAIT_SECONDS])
    def test_two_ends_that_both_wait_to_send_are_read(self, tls, pair, timeout):
        ends = pair(tls, tls)
        received = [bytearray(), bytearray()]
        for end in ends:
            end.settimeout(timeout)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 1 << 16)

        def receive(number):
            while len(received[number]) < 4 << 20:
                received[number] += ends[number].recv(1 << 16)

        senders = [
            threading.Thread(target=end.sendall, args=(bytes(4 << 20),), daemon=True)
            for end in ends
        ]
        for thread in senders:
            thread.start()
        for thread in senders:
            thread.join(0.2)
            assert thread.is_alive()  # there is no room for so much
        receivers = [threading.Thread(target=receive, args=(n,), daemon=True) for n in (0, 1)]
        for thread in receivers:
            thread.start()
        for thread in senders + receivers:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()

    def test_a_send_that_the_peer_does_not_read_times_out(self, tls, pair):
        client, _ = pair(tls, tls)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(32 << 20))

    def test_what_would_block_is_sent_by_the_same_call_again(self, tls, pair):
        client, server = pair(tls, tls)
        client.settimeout(None)  # as of all connections: else the socket waits itself
        data = os.urandom(32 << 20)
        view, blocked = memoryview(data), 0
        received = bytearray()
        while len(view):
            try:
                view = view[
                    client.sendmsg([view[:100_000], view[100_000:]], (), socket.MSG_DONTWAIT) :
                ]
            except BlockingIOError:
                blocked += 1
                received += server.recv(1 << 20)
        while len(received) < len(data):
            received += server.recv(1 << 20)
        assert received == data and blocked

    def test_a_closed_end_is_the_end_of_the_other(self, tls, pair):
        client, server = pair(tls, tls)
        client.sendall(b"last")
        client.close()
        assert server.recv(10) == b"last" and server.recv(10) == b""

    def test_pending_bytes_are_told(self, tls, pair):
        client, server = pair(tls, tls)
        client.sendall(b"four")
        assert server.recv(2) == b"fo" and server.has_pending()
        assert server.recv(2) == b"ur" and not server.has_pending()

    def test_nothing_is_readable_on_the_network(self, tls):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            raw = socket.create_connection(listener.getsockname(), WAIT_SECONDS)
            accepted, _ = listener.accept()
        with accepted, tls.of_client(raw, "127.0.0.1") as client:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.shake_hands()
            with pytest.raises(ssl.SSLError):
                client.sendall(b"a secret")
            assert b"secret" not in accepted.recv(10_000)


class TestHandshake:
    def test_a_certificate_of_another_authority_is_refused(self, tls, files, pair):
        other = tls_of_ray(files(trustme.CA(), name="other"))[1]
        for client, server in ((other, tls), (tls, other)):
            with pytest.raises(OSError, match=r"certificate|unknown ca|EOF|reset|closed"):
                client_end, server_end = pair(client, server)
                client_end.sendall(b"x")
                server_end.recv(1)
                client_end.recv(1)

    def test_a_certificate_of_another_host_is_refused(self, tls, pair):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.3"):
            pair(tls, tls, "127.0.0.3")


class TestCertificatesOfRay:
    def test_without_the_switch_nothing_is_encrypted(self, authority, files):
        environ = files(authority)
        assert tls_of_ray({}) == (False, None)
        assert tls_of_ray({**environ, "RAY_USE_TLS": "0"}) == (False, None)
        assert tls_of_ray({**environ, "RAY_USE_TLS": "true"})[0]

    @pytest.mark.parametrize("wrong", ["missing", "no file", "no certificate"])
    def test_wrong_certificates_are_told_and_never_ignored(
        self, authority, files, tmp_path, caplog, wrong
    ):
        caplog.set_level(logging.WARNING, "rayrpc")
        environ = files(authority)
        if wrong == "missing":
            del environ["RAY_TLS_CA_CERT"]
        elif wrong == "no file":
            environ["RAY_TLS_SERVER_KEY"] = str(tmp_path / "nothing")
        else:
            environ["RAY_TLS_SERVER_CERT"] = __file__
        assert tls_of_ray(environ) == (True, None)
        assert "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT" in caplog.text


class TestTransport:
    def test_calls_to_other_nodes_are_encrypted(self, tls, group):
        far = {"tls": tls, "only": True, "node": "127.0.0.2"}
        a, near, far = group({"tls": tls, "only": True}, {"tls": tls, "only": True}, far)
        for number, data in enumerate((b"x", b"y" * 300_000), 1):
            for caller, callee in ((a, near), (a, far), (far, a)):
                assert caller.call(callee, number, data).wait(WAIT_SECONDS).data == data
        kinds = [
            type(caller.transport.routes()[callee.token].connection.connected_socket).__name__
            for caller, callee in ((a, near), (a, far), (far, a))
        ]
        assert kinds == ["socket", "TlsSocket", "TlsSocket"]
        assert not (a.fallback.calls or far.fallback.calls)

    def test_many_calls_at_once_over_an_encrypted_connection(self, tls, group, quick_switches):
        a, far = group({"tls": tls, "only": True}, {"tls": tls, "only": True, "node": "127.0.0.2"})
        wrong = []

        def work(first):
            for number in range(first, first + 200):
                data = b"%d" % number * 50
                if a.call(far, number, data, [os.urandom(100)]).wait(WAIT_SECONDS).data != data:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not wrong

    def test_a_peer_that_does_not_encrypt_is_not_called_in_the_clear(self, tls, group):
        a, far = group({"tls": tls, "only": True}, {"only": True, "node": "127.0.0.2"})
        for caller, callee in ((a, far), (far, a)):
            with pytest.raises(CallError, match="no connection could be made"):
                caller.call(callee).wait(WAIT_SECONDS)
        assert a.served == far.served == 0
