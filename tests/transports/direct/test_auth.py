"""Proofs of membership, which both ends of a connection give."""

import os

import pytest

from rayrpc._transports.direct.auth import AuthenticationError, ClientHandshake, ServerHandshake

SECRET = b"s" * 32


def shake_hands(callee, caller):
    """Run the handshake; return the last bytes that the callee received."""
    challenge = callee.receive(caller.hello)
    callee.receive(caller.receive(challenge))


class TestHandshake:
    def test_members_accept_one_another(self):
        callee = ServerHandshake(SECRET, "bob")
        shake_hands(callee, ClientHandshake(SECRET, "alice", "bob"))
        assert callee.done and callee.peer == "alice" and not callee.is_bulk

    def test_it_says_to_which_pair_the_connection_belongs(self):
        callee = ServerHandshake(SECRET, "bob")
        shake_hands(callee, ClientHandshake(SECRET, "alice", "bob", True, 1 << 40))
        assert callee.is_bulk and callee.pair == 1 << 40

    def test_it_may_come_byte_by_byte(self):
        callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
        challenge = b"".join(callee.receive(bytes([b])) for b in caller.hello)
        for byte in caller.receive(challenge):
            assert not callee.done
            callee.receive(bytes([byte]))
        assert callee.done

    def test_a_caller_without_the_secret_is_refused(self):
        callee, intruder = ServerHandshake(SECRET, "bob"), ClientHandshake(b"guess", "alice", "bob")
        challenge = callee.receive(intruder.hello)
        with pytest.raises(AuthenticationError, match="secret"):
            intruder.receive(challenge)
        with pytest.raises(AuthenticationError, match="secret"):
            callee.receive(os.urandom(callee.missing))
        assert not callee.done

    def test_a_callee_without_the_secret_is_refused(self):
        caller = ClientHandshake(SECRET, "alice", "bob")
        with pytest.raises(AuthenticationError):
            caller.receive(ServerHandshake(b"guess", "bob").receive(caller.hello))

    def test_a_proof_is_good_for_one_connection_only(self):
        caller = ClientHandshake(SECRET, "alice", "bob")
        proof = caller.receive(ServerHandshake(SECRET, "bob").receive(caller.hello))
        again = ServerHandshake(SECRET, "bob")
        again.receive(caller.hello)
        with pytest.raises(AuthenticationError):
            again.receive(proof)

    def test_a_proof_of_the_callee_is_none_of_a_caller(self):
        callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
        challenge = callee.receive(caller.hello)
        with pytest.raises(AuthenticationError):
            callee.receive(challenge[32:])

    def test_a_caller_that_wants_another_worker_is_refused(self):
        with pytest.raises(AuthenticationError, match="another"):
            ServerHandshake(SECRET, "bob").receive(ClientHandshake(SECRET, "alice", "carol").hello)

    def test_garbage_is_refused_at_its_first_bytes(self):
        with pytest.raises(AuthenticationError):
            ServerHandshake(SECRET, "bob").receive(b"GET / HTTP/1.1\r\n")
