"""The outcome of a computation or a call: a value or an error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Error", "Outcome", "Value", "attempt", "complete", "fresh", "text_of"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


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


def fresh(error: E) -> E:
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


def text_of(error: BaseException, show: Callable[[object], str] = str) -> str:
    """Return an exception's text.

    Args:
        error: the exception; its class may raise anything when it is shown.
        show: ``str`` or ``repr``.
    """
    try:
        return show(error)
    except BaseException:
        return f"<{type(error).__qualname__} that cannot be shown>"


def complete(future: Any, outcome: Outcome[Any]) -> None:
    """Complete a torch Future, unless the program has completed it.

    Args:
        future: the Future.
        outcome: an error that is no ``Exception`` becomes a RuntimeError, as in torch.
    """
    if future.done():
        return
    try:
        if isinstance(outcome, Value):
            future.set_result(outcome.value)
            return
        error = outcome.error
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        # as Future.set_exception does, but each wait() raises a copy of its own
        future._set_unwrap_func(functools.partial(_raise_fresh, error.with_traceback(None)))
        future.set_result(error)
    except RuntimeError:
        if not future.done():  # else the program was faster, just now
            raise


def _raise_fresh(error: BaseException, value: Any) -> Any:
    if value is error:
        raise fresh(error)
    return value  # the program's, which was faster
