"""How two workers prove to one another that they are of the same group; no I/O.

    caller ── hello: magic, nonce, both tokens ──> callee
    caller <── nonce, HMAC of all that ─────────── callee
    caller ── HMAC of all that ──────────────────> callee

The key is the group's secret, which its directory gives to members alone.  The messages have
fixed sizes, and nothing in them is interpreted before it is proved.
"""

from __future__ import annotations

import hmac
import os
import struct

from rayrpc.errors import RpcError

__all__ = [
    "ANSWER_SIZE",
    "AuthenticationError",
    "CHALLENGE_SIZE",
    "ClientHandshake",
    "ServerHandshake",
]

_MAGIC = b"rayrpc 1"
_HELLO = struct.Struct("8s32s16s16s")
_NONCE = 32
_PROOF = 32
CHALLENGE_SIZE = _NONCE + _PROOF
ANSWER_SIZE = _PROOF


class AuthenticationError(RpcError):
    """The other end of a connection is not who it should be."""


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + hello + nonce, "sha256")


class ServerHandshake:
    """The callee's side.

    Args:
        secret (bytes): of the group.
        token (str): of this worker's membership.
    """

    def __init__(self, secret: bytes, token: str) -> None:
        self._secret = secret
        self._token = token.encode()[:16]
        self._hello = b""
        self._nonce = b""
        self._got = b""
        self.done = False

    @property
    def missing(self) -> int:
        """How many bytes to read next."""
        whole = ANSWER_SIZE if self._hello else _HELLO.size
        return whole - len(self._got)

    def receive(self, data: bytes) -> bytes:
        """Take bytes that arrived, ``missing`` at most; return what to send.

        Raises:
            AuthenticationError: they are not of a member of this group.
        """
        self._got += data
        if self.missing:
            if not self._hello and not _MAGIC.startswith(self._got[: len(_MAGIC)]):
                raise AuthenticationError("no rayrpc worker")
            return b""
        got, self._got = self._got, b""
        if not self._hello:
            magic, _, _, to = _HELLO.unpack(got)
            if magic != _MAGIC or to.rstrip(b"\0") != self._token:
                raise AuthenticationError("it wants another worker")
            self._hello, self._nonce = got, os.urandom(_NONCE)
            return self._nonce + _proof(self._secret, b"callee", got, self._nonce)
        if not hmac.compare_digest(got, _proof(self._secret, b"caller", self._hello, self._nonce)):
            raise AuthenticationError("it does not know the group's secret")
        self.done = True
        return b""


class ClientHandshake:
    """The caller's side: send ``hello``, then what ``receive`` makes of the challenge.

    Args:
        secret (bytes): of the group.
        me (str): token of this worker's membership.
        to (str): token of the callee's.
    """

    def __init__(self, secret: bytes, me: str, to: str) -> None:
        self._secret = secret
        self.hello = _HELLO.pack(_MAGIC, os.urandom(_NONCE), me.encode(), to.encode())

    def receive(self, challenge: bytes) -> bytes:
        """Return the answer to a challenge of ``CHALLENGE_SIZE`` bytes.

        Raises:
            AuthenticationError: who sent it is not the callee.
        """
        nonce, proof = challenge[:_NONCE], challenge[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"callee", self.hello, nonce)):
            raise AuthenticationError("it does not know the group's secret")
        return _proof(self._secret, b"caller", self.hello, nonce)
