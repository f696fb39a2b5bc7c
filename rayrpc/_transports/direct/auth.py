"""The handshake by which two workers prove that they are members of the same group; no I/O.

    caller ── hello: magic, nonce, both tokens, pair ──> callee
    caller <── nonce, HMAC of hello and nonce ────────── callee
    caller ── HMAC of hello and nonce ─────────────────> callee

A pair is a connection and the connection for large messages beside it; the caller numbers pairs.

The key is the group's secret, which its directory gives to members only.  The messages have
fixed sizes, and nothing is unpickled before both proofs are checked.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable

from rayrpc.errors import RpcError

__all__ = [
    "ANSWER_SIZE",
    "AuthenticationError",
    "CHALLENGE_SIZE",
    "ClientHandshake",
    "ServerHandshake",
]

_MAGIC = b"rayrpc 2"
_BULK_MAGIC = b"rayrpc B"  # the connection is for large messages
_HELLO = struct.Struct("<8s32s16s16sQ")
_NONCE = 32
_PROOF = 32
CHALLENGE_SIZE = _NONCE + _PROOF
ANSWER_SIZE = _PROOF


class AuthenticationError(RpcError):
    """The peer of a connection failed to prove its identity."""


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + hello + nonce, "sha256")


class ServerHandshake:
    """The callee's side.

    Args:
        secret (bytes): the group's secret.
        token (str): token of this worker's membership.
        is_expelled (Callable): tells whether the group has expelled the member with a token.
    """

    def __init__(
        self, secret: bytes, token: str, is_expelled: Callable[[str], bool] = lambda token: False
    ) -> None:
        self._secret = secret
        self._token = token.encode()[:16]
        self._is_expelled = is_expelled
        #: token of the caller's membership, once it is known
        self.peer = ""
        #: whether the connection is for large messages, once it is known
        self.is_bulk = False
        #: number of the pair of connections, once it is known
        self.pair = 0
        self._hello = b""
        self._nonce = b""
        self._received = b""
        self.done = False

    @property
    def missing(self) -> int:
        """The number of bytes to read next."""
        size = ANSWER_SIZE if self._hello else _HELLO.size
        return size - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Handle received bytes, ``missing`` at most; return the bytes to send.

        Raises:
            AuthenticationError: the caller is no member of this group, or wants another worker.
        """
        self._received += data
        if self.missing:
            begin = self._received[: len(_MAGIC)]
            if not self._hello and not (_MAGIC.startswith(begin) or _BULK_MAGIC.startswith(begin)):
                raise AuthenticationError("the caller is no rayrpc worker")
            return b""
        received, self._received = self._received, b""
        if not self._hello:
            magic, _, caller, to, self.pair = _HELLO.unpack(received)
            self.is_bulk = magic == _BULK_MAGIC
            if magic not in (_MAGIC, _BULK_MAGIC) or to.rstrip(b"\0") != self._token:
                raise AuthenticationError("the caller wants another worker")
            self.peer = caller.rstrip(b"\0").decode("ascii", "replace")
            if self._is_expelled(self.peer):
                raise AuthenticationError("the group has declared the caller lost")
            self._hello, self._nonce = received, os.urandom(_NONCE)
            return self._nonce + _proof(self._secret, b"callee", received, self._nonce)
        if not hmac.compare_digest(
            received, _proof(self._secret, b"caller", self._hello, self._nonce)
        ):
            raise AuthenticationError("the caller does not know the group's secret")
        self.done = True
        return b""


class ClientHandshake:
    """The caller's side: send ``hello``, then the answer that ``receive`` returns.

    Args:
        secret (bytes): the group's secret.
        me (str): token of this worker's membership.
        to (str): token of the callee's membership.
        is_bulk (bool): the connection is for large messages.
        pair (int): number of the pair of connections.
    """

    def __init__(
        self, secret: bytes, me: str, to: str, is_bulk: bool = False, pair: int = 0
    ) -> None:
        self._secret = secret
        magic = _BULK_MAGIC if is_bulk else _MAGIC
        self.hello = _HELLO.pack(magic, os.urandom(_NONCE), me.encode(), to.encode(), pair)

    def receive(self, challenge: bytes) -> bytes:
        """Return the answer to a challenge of ``CHALLENGE_SIZE`` bytes.

        Raises:
            AuthenticationError: the challenge is not the callee's.
        """
        nonce, proof = challenge[:_NONCE], challenge[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"callee", self.hello, nonce)):
            raise AuthenticationError("the callee does not know the group's secret")
        return _proof(self._secret, b"caller", self.hello, nonce)
