"""The words of calls that end without a reply."""

import pytest

from rayrpc._runtime.call_errors import cancelled, name_of, shut_down, timed_out
from rayrpc._runtime.invocation import prompt
from rayrpc._runtime.rrefs import proxy
from rayrpc.errors import CallError, CallTimeoutError, CancelledError


def users():
    """A user's function."""


class Service:
    def method(self):
        """A user's method."""


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (users, "the call of users on RPC worker 'b'"),
        (Service.method, "the call of Service.method on RPC worker 'b'"),
        (Service().method, "the call of Service.method on RPC worker 'b'"),
        ("method", "the call of method on RPC worker 'b'"),
        (vars(proxy)["_local_invoke"], "the call of a method of an RRef's value on RPC worker 'b'"),
        (None, "a fetch from RPC worker 'b'"),
        (prompt, ""),
    ],
)
def test_a_call_is_named_by_what_the_user_knows_of_it(func, name):
    assert name_of(func, "b") == name
    error = cancelled(func, "b")
    named = name or "the call of rayrpc on RPC worker 'b'"
    assert isinstance(error, CancelledError) and str(error) == f"{named} was cancelled"


@pytest.mark.parametrize(("seconds", "ms"), [(0.05, 50), (1.0, 1000), (0.0014, 1), (60, 60000)])
def test_a_timeout_is_told_in_torchs_words_in_whole_milliseconds(seconds, ms):
    error = timed_out(seconds)
    assert isinstance(error, CallTimeoutError)
    assert str(error) == (
        f"RPC ran for more than set timeout ({ms} ms) and will now be marked with an error"
    )


def test_a_wait_without_a_timeout_ends_by_its_caller():
    assert str(timed_out(None)) == "the caller of this RPC stopped waiting for its reply"


def test_a_shutdown_is_an_error_of_the_call_and_each_has_its_own():
    error = shut_down()
    assert type(error) is CallError and error is not shut_down()
    assert str(error) == "RPC was shut down on this worker before the call completed"
