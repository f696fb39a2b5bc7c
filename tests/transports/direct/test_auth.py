"""The handshake of two workers that are to be members of the same group; bytes only."""

import os

import pytest

from rayrpc._transports.direct.auth import (
    ANSWER_SIZE,
    CHALLENGE_SIZE,
    AuthenticationError,
    ClientHandshake,
    ServerHandshake,
)
from rayrpc.errors import RpcError

SECRET = b"s" * 32


def shake_hands(callee, caller):
    """Run the handshake; return the last bytes that the callee received."""
    challenge = callee.receive(caller.hello)
    callee.receive(caller.receive(challenge))


def test_members_accept_one_another():
    callee = ServerHandshake(SECRET, "bob")
    shake_hands(callee, ClientHandshake(SECRET, "alice", "bob"))
    assert callee.done and callee.peer == "alice" and not callee.is_bulk


def test_it_says_to_which_pair_the_connection_belongs():
    callee = ServerHandshake(SECRET, "bob")
    shake_hands(callee, ClientHandshake(SECRET, "alice", "bob", True, 1 << 40))
    assert callee.is_bulk and callee.pair == 1 << 40


def test_it_may_come_byte_by_byte():
    callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
    challenge = b"".join(callee.receive(bytes([b])) for b in caller.hello)
    for byte in caller.receive(challenge):
        assert not callee.done
        callee.receive(bytes([byte]))
    assert callee.done


def test_a_caller_without_the_secret_is_refused():
    callee, intruder = ServerHandshake(SECRET, "bob"), ClientHandshake(b"guess", "alice", "bob")
    challenge = callee.receive(intruder.hello)
    with pytest.raises(AuthenticationError, match="secret"):
        intruder.receive(challenge)
    with pytest.raises(AuthenticationError, match="secret"):
        callee.receive(os.urandom(callee.missing))
    assert not callee.done


def test_a_callee_without_the_secret_is_refused():
    caller = ClientHandshake(SECRET, "alice", "bob")
    with pytest.raises(AuthenticationError):
        caller.receive(ServerHandshake(b"guess", "bob").receive(caller.hello))


def test_a_proof_is_good_for_one_connection_only():
    caller = ClientHandshake(SECRET, "alice", "bob")
    proof = caller.receive(ServerHandshake(SECRET, "bob").receive(caller.hello))
    again = ServerHandshake(SECRET, "bob")
    again.receive(caller.hello)
    with pytest.raises(AuthenticationError):
        again.receive(proof)


def test_a_proof_of_the_callee_is_none_of_a_caller():
    callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
    challenge = callee.receive(caller.hello)
    with pytest.raises(AuthenticationError):
        callee.receive(challenge[32:])


def test_a_caller_that_wants_another_worker_is_refused():
    with pytest.raises(AuthenticationError, match="another"):
        ServerHandshake(SECRET, "bob").receive(ClientHandshake(SECRET, "alice", "carol").hello)


def test_garbage_is_refused_at_its_first_bytes():
    with pytest.raises(AuthenticationError):
        ServerHandshake(SECRET, "bob").receive(b"GET / HTTP/1.1\r\n")


def test_the_sizes_of_what_is_missing_end_with_each_message():
    callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
    assert callee.missing == len(caller.hello)
    assert callee.receive(caller.hello[:10]) == b"" and callee.missing == len(caller.hello) - 10
    challenge = callee.receive(caller.hello[10:])
    assert len(challenge) == CHALLENGE_SIZE and callee.missing == ANSWER_SIZE
    answer = caller.receive(challenge)
    assert len(answer) == ANSWER_SIZE
    assert callee.receive(answer[:31]) == b"" and callee.missing == 1 and not callee.done
    assert callee.receive(answer[31:]) == b"" and callee.done


@pytest.mark.parametrize(
    "position", [0, 8, 40, 56, 72], ids=["magic", "nonce", "caller", "callee", "pair"]
)
def test_a_hello_that_was_changed_on_its_way_is_refused(position):
    """Also where it says another caller, pair or size of messages, which the proofs hold."""
    callee, caller = ServerHandshake(SECRET, "bob"), ClientHandshake(SECRET, "alice", "bob")
    changed = bytearray(caller.hello)
    if position == 0:  # as if the connection was for large messages
        changed[:8] = ClientHandshake(SECRET, "alice", "bob", is_bulk=True).hello[:8]
    else:
        changed[position] ^= 1
    with pytest.raises(AuthenticationError):
        caller.receive(callee.receive(bytes(changed)))


def test_an_answer_to_another_challenge_is_refused():
    caller = ClientHandshake(SECRET, "alice", "bob")
    callees = [ServerHandshake(SECRET, "bob") for _ in range(2)]
    challenges = [callee.receive(caller.hello) for callee in callees]
    assert challenges[0] != challenges[1]
    with pytest.raises(AuthenticationError, match="the caller does not know the group's secret"):
        callees[1].receive(caller.receive(challenges[0]))
    assert not callees[1].done


def test_two_callers_with_the_same_tokens_have_different_proofs():
    callers = [ClientHandshake(SECRET, "alice", "bob") for _ in range(2)]
    assert callers[0].hello != callers[1].hello
    challenge = ServerHandshake(SECRET, "bob").receive(callers[0].hello)
    with pytest.raises(AuthenticationError, match="the callee does not know the group's secret"):
        callers[1].receive(challenge)


def test_a_member_that_the_group_has_expelled_is_refused_before_any_proof():
    asked = []

    def is_expelled(token):
        asked.append(token)
        return token == "alice"

    callee = ServerHandshake(SECRET, "bob", is_expelled)
    with pytest.raises(AuthenticationError, match="the group has declared the caller lost"):
        callee.receive(ClientHandshake(SECRET, "alice", "bob").hello)
    other = ServerHandshake(SECRET, "bob", is_expelled)
    shake_hands(other, ClientHandshake(SECRET, "carol", "bob"))
    assert other.done and asked == ["alice", "carol"]


@pytest.mark.parametrize("begin", [b"G", b"rayrpc 1", b"rayrpc X", b"rayrpc C"])
def test_another_version_or_protocol_is_refused_at_the_first_byte_that_differs(begin):
    callee = ServerHandshake(SECRET, "bob")
    with pytest.raises(AuthenticationError, match="the caller is no rayrpc worker"):
        for byte in begin:
            callee.receive(bytes([byte]))


def test_tokens_longer_than_their_field_mean_the_worker_by_their_beginning():
    long = "bob-with-a-token-of-many-letters"
    callee = ServerHandshake(SECRET, long)
    shake_hands(callee, ClientHandshake(SECRET, "alice", long))
    assert callee.done
    with pytest.raises(AuthenticationError, match="another worker"):
        ServerHandshake(SECRET, long).receive(ClientHandshake(SECRET, "alice", "bob").hello)


def test_its_error_is_one_of_rayrpc():
    assert issubclass(AuthenticationError, RpcError)
