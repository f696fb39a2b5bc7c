"""Ray's errors in rayrpc's words."""

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    RayActorError,
    RaySystemError,
    RayTaskError,
)

from rayrpc._protocol.membership import Member
from rayrpc._transports.ray.ray_errors import cause_of, translate
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

BOB = Member("token", "bob", 1, node="10.0.0.2")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Ray has not been started yet. You can start Ray with 'ray.init()'.",
            "Ray was shut down in this process; call rpc.shutdown() before ray.shutdown()",
        ),
        (
            "The actor is dead because its owner has died. Owner Id: 01",
            "its process died, or exited without shutdown()",
        ),
        (
            "The actor died because its owner has exited.",
            "its process died, or exited without shutdown()",
        ),
        (
            "The actor is dead because it was killed by `ray.kill`.",
            "it was ended by ray.kill or by the process that started it",
        ),
        ("The actor is dead because its node has died.", "its node died"),
        ("The actor died since its node was dead when it was created", "its node died"),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of "
            "file. There are some potential root causes.",
            "its process died: Worker unexpectedly exits with a connection error code 2.",
        ),
        (
            "The actor is dead because all references to it were removed.",
            "all references to it were removed.",
        ),
        ("something else", "something else"),
    ],
)
def test_the_cause_is_told_in_one_line(text, cause):
    assert cause_of(RaySystemError(text)).endswith(cause)
    several = text.replace(" ", "\n\t ", 3)
    assert cause_of(Exception(f"\x1b[36m{several}\x1b[0m")) == cause


def test_a_long_cause_is_cut():
    assert cause_of(Exception("because " + "x" * 1000)) == "x" * 300


def test_an_error_of_the_endpoint_itself_is_a_call_error_with_its_text():
    error = RayTaskError("call", "\x1b[36mTraceback\x1b[0m: no memory", ValueError("no memory"))
    translated = translate(BOB, error)
    assert type(translated) is CallError
    assert str(translated).startswith("RPC worker 'bob' could not handle a call: ")
    assert "Traceback: no memory" in str(translated)


def test_a_connection_that_was_cut_leaves_it_open_whether_the_call_ran():
    translated = translate(BOB, ActorUnavailableError("because the network is away", None))
    assert type(translated) is CallLostError
    assert "'bob' on node 10.0.0.2 was cut during a call" in str(translated)
    assert "whether the function ran is not known (the network is away" in str(translated)
    assert str(translated).endswith("Call again if it may run twice.")


def test_the_end_of_an_actor_is_the_death_of_its_worker():
    translated = translate(BOB, RayActorError(error_msg="because its node has died."))
    assert type(translated) is WorkerDiedError
    assert "'bob'" in str(translated) and "its node died" in str(translated)
    assert "10.0.0.2" in str(translated)


def test_any_other_error_loses_the_reply():
    translated = translate(BOB, RaySystemError("out of disk"))
    assert type(translated) is CallLostError
    assert "The reply of RPC worker 'bob' was lost: " in str(translated)
    assert "out of disk" in str(translated)
