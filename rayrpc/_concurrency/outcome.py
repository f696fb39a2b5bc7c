"""How something ended: a value or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Error", "Outcome", "Value", "attempt", "complete", "fresh"]

T = TypeVar("T")


@dataclass(slots=True)
class Value(Generic[T]):
    """It ended well."""

    value: T

    def unwrap(self) -> T:
        """Return the value."""
        return self.value


@dataclass(slots=True)
class Error:
    """It ended with an exception.

    Args:
        error (BaseException): the exception.
        remote (Any): how it travels to other workers, where that is known already.
    """

    error: BaseException
    remote: Any = None

    def unwrap(self) -> NoReturn:
        """Raise the error."""
        raise fresh(self.error)


def fresh(error: BaseException) -> BaseException:
    """Return an exception like ``error``, to raise without leaving a trace in it.

    A kept exception that is raised keeps the frames of whoever it was raised in, and what these
    hold; kept by a Future, whose inside Python's collector cannot see, it keeps them for ever.
    """
    try:
        if type(error).__module__ == "builtins":  # some keep what they say outside of args
            again = copy.copy(error)
            again.__cause__ = error.__cause__
            again.__suppress_context__ = error.__suppress_context__
            return again
        again = type(error).__new__(type(error), *error.args)
        again.args = error.args
        again.__dict__.update(error.__dict__)
    except Exception:  # an exotic class: better the same one than another
        return error
    again.__cause__ = error.__cause__
    again.__suppress_context__ = error.__suppress_context__
    return again


Outcome = Value[T] | Error


def attempt(compute: Callable[[], T]) -> Outcome[T]:
    """Return what comes of a computation."""
    try:
        return Value(compute())
    except BaseException as exc:
        return Error(exc)


def complete(future: Any, outcome: Outcome[Any]) -> None:
    """Give a torch Future its value or error."""
    if isinstance(outcome, Value):
        future.set_result(outcome.value)
        return
    error = outcome.error
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    # as Future.set_exception does, but with a new exception for each who reads it
    future._set_unwrap_func(_raise_fresh)
    future.set_result(error.with_traceback(None))


def _raise_fresh(error: BaseException) -> NoReturn:
    raise fresh(error)
