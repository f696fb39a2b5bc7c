"""The outcome of a computation or a call: a value or an error."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Error", "Outcome", "Value", "attempt", "complete", "fresh", "text_of", "without_frames"]

logger = logging.getLogger(__name__)

# How many errors that nobody has asked for a process logs.
MOST_LOGGED = 100

_unknown = itertools.count(1)

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
        call (str): the call that failed: it is logged if the error is collected before anybody has
            asked for it; empty: nobody need ask.
        is_known (bool): somebody has asked for the error.
    """

    error: BaseException
    remote: Any = None
    call: str = field(default="", compare=False)
    is_known: bool = field(default=False, compare=False)

    def unwrap(self) -> NoReturn:
        """Raise a copy of the error; see ``fresh``."""
        self.is_known = True
        raise fresh(self.error)

    def __del__(self) -> None:
        if self.call and not self.is_known and not sys.is_finalizing():
            _log_unknown(self)


def _log_unknown(error: Error) -> None:
    number = next(_unknown)
    if number <= MOST_LOGGED:
        logger.warning(
            "%s failed, and the program has not asked for the error: %s",
            error.call,
            text_of(error.error),
        )
    elif number == MOST_LOGGED + 1:
        logger.warning("further errors that the program does not ask for are not logged")


def fresh(error: E) -> E:
    """Return a copy of an exception, to be raised in its place.

    A raised exception would refer to frames; see ``without_frames``.

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


def without_frames(error: E) -> E:
    """Drop the tracebacks of an exception and of its causes, and what each was raised beside.

    A raised exception refers to the frames that it passed and to their callers, and thus to all
    their variables.  If a Future keeps it, and one of these variables is the Future, Python's
    garbage collector cannot see that cycle, and it is never freed.

    Returns:
        ``error``.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = each.__context__ = None
        each = each.__cause__
    return error


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
        _forget(outcome)
        return
    try:
        if isinstance(outcome, Value):
            future.set_result(outcome.value)
            return
        error = outcome.error
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        # as Future.set_exception does, but each wait() raises a copy of its own
        raise_error = functools.partial(_raise_fresh, outcome, without_frames(error))
        future._set_unwrap_func(raise_error)
        future.set_result(error)
    except RuntimeError:
        if not future.done():  # else the program was faster, just now
            raise
        _forget(outcome)


def _forget(outcome: Outcome[Any]) -> None:
    """Drop an outcome: the program has completed the Future itself."""
    if isinstance(outcome, Error):
        outcome.is_known = True


def _raise_fresh(outcome: Error, error: BaseException, value: Any) -> Any:
    __tracebackhide__ = True
    outcome.is_known = True
    if value is error:
        raise fresh(error)
    return value  # the program's, which was faster
