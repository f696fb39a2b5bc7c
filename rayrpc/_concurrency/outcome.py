"""The outcome of a computation or a call: a value or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Error", "Outcome", "Value", "attempt", "complete", "fresh"]

T = TypeVar("T")


@dataclass(slots=True)
class Value(Generic[T]):
    """A result.

    Args:
        value: the result.
    """

    value: T

    def unwrap(self) -> T:
        """Return the value."""
        return self.value


@dataclass(slots=True)
class Error:
    """An exception.

    Args:
        error (BaseException): the exception.
        remote (Any): its pickled form for other workers, if the error came in that form.
    """

    error: BaseException
    remote: Any = None

    def unwrap(self) -> NoReturn:
        """Raise a copy of the error; see ``fresh``."""
        raise fresh(self.error)


def fresh(error: BaseException) -> BaseException:
    """Return a copy of an exception, to be raised in its place.

    A raised exception refers to the frames that it passed, and thus to all their variables.  If a
    Future keeps it, Python's garbage collector cannot see that cycle, and it is never freed.

    Returns:
        The copy, without a traceback; ``error`` itself if its class cannot be copied.
    """
    try:
        if type(error).__module__ == "builtins":  # some keep their text outside of args
            again = copy.copy(error)
            again.__cause__ = error.__cause__
            again.__suppress_context__ = error.__suppress_context__
            return again
        again = type(error).__new__(type(error), *error.args)
        again.args = error.args
        again.__dict__.update(error.__dict__)
    except Exception:  # better the same exception than one of another type
        return error
    again.__cause__ = error.__cause__
    again.__suppress_context__ = error.__suppress_context__
    return again


Outcome = Value[T] | Error


def attempt(compute: Callable[[], T]) -> Outcome[T]:
    """Run ``compute``; return its value or its exception."""
    try:
        return Value(compute())
    except BaseException as exc:
        return Error(exc)


def complete(future: Any, outcome: Outcome[Any]) -> None:
    """Complete a torch Future.

    Args:
        future: the Future; must be pending.
        outcome: an error that is no ``Exception`` becomes a RuntimeError, as in torch.
    """
    if isinstance(outcome, Value):
        future.set_result(outcome.value)
        return
    error = outcome.error
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    # as Future.set_exception does, but each wait() raises a copy of its own
    future._set_unwrap_func(_raise_fresh)
    future.set_result(error.with_traceback(None))


def _raise_fresh(error: BaseException) -> NoReturn:
    raise fresh(error)
