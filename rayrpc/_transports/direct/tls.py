"""TLS for connections between nodes, with the certificates of Ray's TLS (``RAY_USE_TLS``).

Both ends show a certificate of the cluster's authority.  The handshake of ``auth`` follows,
encrypted.

Different threads write and read a TLS connection at the same time, which OpenSSL does not allow: a
lock guards the cipher, and no thread holds the lock while it waits for the network.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from rayrpc._transports.direct.wire import is_writable
from rayrpc._transports.encryption import ray_uses_tls

__all__ = ["Tls", "TlsSocket", "tls_of_ray"]

logger = logging.getLogger(__name__)

# How many bytes are encrypted, and how many are received, at a time.
CHUNK = 256 << 10

_FILES = ("SERVER_CERT", "SERVER_KEY", "CA_CERT")


class Tls:
    """The cluster's certificates.

    Args:
        certificate (str): path of this node's certificate, in PEM.
        key (str): path of the certificate's private key.
        authority (str): path of the certificates with which peers' certificates are checked.

    Raises:
        OSError: a file cannot be read, or is no certificate or key.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.verify_mode = ssl.CERT_REQUIRED
        self._server.num_tickets = 0  # no session is resumed
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the peer's address, too
        for context in (self._server, self._client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)

    def of_server(self, connection: socket.socket) -> TlsSocket:
        """Encrypt an accepted connection; the first reads do its handshake."""
        return TlsSocket(connection, self._server, None)

    def of_client(self, connection: socket.socket, host: str) -> TlsSocket:
        """Encrypt a connection to a host, whose address its certificate must name."""
        return TlsSocket(connection, self._client, host)


def tls_of_ray(environ: Mapping[str, str]) -> tuple[bool, Tls | None]:
    """Tell whether Ray encrypts what it sends over the network; return its certificates.

    Args:
        environ: the environment.

    Returns:
        Whether it does, and the certificates; None if they cannot be used, which is logged.
    """
    if not ray_uses_tls(environ):
        return False, None
    try:
        return True, Tls(*(environ[f"RAY_TLS_{name}"] for name in _FILES))
    except (KeyError, OSError) as exc:
        logger.warning(
            "RAY_USE_TLS is set, but its certificates cannot be used (%r): no connections to other "
            "nodes are made. Set %s to paths of files in PEM.",
            exc,
            ", ".join(f"RAY_TLS_{name}" for name in _FILES),
        )
        return True, None


class TlsSocket(socket.socket):
    """An encrypted connection, with the methods of a socket that connections use.

    Args:
        connection (socket): a connected socket; this one takes over its descriptor.
        context (SSLContext): the certificates and settings of this end.
        host (str | None): the peer's address, if this end has connected.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, host: str | None
    ) -> None:
        timeout = connection.gettimeout()
        super().__init__(
            connection.family, connection.type, connection.proto, fileno=connection.detach()
        )
        self.settimeout(timeout)
        self._received = ssl.MemoryBIO()  # encrypted bytes of the peer
        self._encrypted = ssl.MemoryBIO()  # ... for the peer
        self._cipher = context.wrap_bio(
            self._received, self._encrypted, server_side=host is None, server_hostname=host
        )
        self._lock = threading.Lock()  # guards all that follows, and the cipher
        self._has_shaken_hands = False
        self._unsent = memoryview(b"")  # encrypted bytes
        self._count = 0  # of plain bytes in ``_unsent`` that ``sendmsg`` has not returned yet
        self._is_reading = False

    def has_pending(self) -> bool:
        """Tell whether bytes were received that ``recv_into`` has not returned."""
        return bool(self._received.pending or self._cipher.pending())

    def shake_hands(self) -> None:
        """Do the handshake, within the socket's timeout for each step.

        Raises:
            OSError: the peer's certificate is not valid, or the peer refuses this end's.
        """
        self._decrypt(None)

    # -- reading ------------------------------------------------------------------------------

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Return received bytes; see ``socket.recv``."""
        buffer = bytearray(bufsize)
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into a buffer; see ``socket.recv_into``.

        Raises:
            OSError: the connection broke, or an exception came out of an earlier call: bytes may
                have been lost then.
        """
        if self._is_reading:
            raise OSError("reading was interrupted")
        self._is_reading = True
        try:
            count = self._decrypt(memoryview(buffer))
        except BlockingIOError:
            self._is_reading = False
            raise
        self._is_reading = False
        return count

    def _decrypt(self, view: memoryview | None) -> int:
        while True:
            with self._lock:
                try:
                    if not self._has_shaken_hands:
                        self._cipher.do_handshake()
                        self._has_shaken_hands = True
                    result = 0 if view is None else int(self._cipher.read(len(view), view))
                    return result
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
                finally:  # the cipher may have an answer to send
                    self._collect()
                    with contextlib.suppress(BlockingIOError):  # the next message sends it
                        self._flush(0)
            data = super().recv(CHUNK)
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    # -- writing ------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        """Send some of the bytes; see ``sendmsg``."""
        return self.sendmsg([data], (), flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all bytes; see ``socket.sendall``."""
        view = memoryview(data)
        while len(view):
            view = view[self.send(view, flags) :]

    def sendmsg(
        self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None
    ) -> int:
        """Send some of the bytes; see ``socket.sendmsg``.

        After BlockingIOError call it again with the same bytes: they are encrypted already.
        """
        while True:
            try:
                with self._lock:
                    if not self._count:
                        self._count = self._encrypt(buffers)
                        self._collect()
                    self._flush(flags)
                    count, self._count = self._count, 0
                    return count
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    raise
            # without the lock: the peer may wait until this end reads
            if not is_writable(self, self.gettimeout()):
                raise TimeoutError("timed out")

    def _encrypt(self, buffers: Iterable[Any]) -> int:
        count = 0
        for buffer in buffers:
            part = memoryview(buffer).cast("B")[: CHUNK - count]
            if len(part):
                count += self._cipher.write(part)
            if count == CHUNK:
                break
        return count

    def _collect(self) -> None:
        if self._encrypted.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._encrypted.read())

    def _flush(self, flags: int) -> None:
        """Send encrypted bytes, with the lock held; raise BlockingIOError instead of waiting."""
        while len(self._unsent):
            if self.gettimeout() is not None and not is_writable(self, 0):
                raise BlockingIOError  # ``send`` of a socket with a timeout would wait
            sent = super().send(self._unsent, flags | socket.MSG_DONTWAIT)
            self._unsent = self._unsent[sent:]
