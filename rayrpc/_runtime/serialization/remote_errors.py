"""Errors of users' functions, from the callee to the caller.

As in torch, the caller raises an exception that is made from one string: the worker, the error and
its traceback.  ``to_here`` raises the error's own type.  ``rpc_sync`` and Futures do so in torch
for ValueErrors and TypeErrors alone, and raise RuntimeErrors for all others: here these are of a
class that is both, so that ``except RuntimeError`` catches them, and ``except`` of their own type,
too.  If the type cannot be made from one string, or not be imported, it is a RuntimeError alone.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rayrpc import config
from rayrpc._concurrency.outcome import text_of
from rayrpc._protocol.ids import WorkerInfo
from rayrpc.errors import RpcError

__all__ = ["RemoteException", "describe", "described_as", "rebuild"]

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


class RemoteException(NamedTuple):
    """An exception in a reply.

    Args:
        msg (str): worker, error and traceback.
        type_data (bytes): its pickled type; empty if the type cannot be sent.
        type_name (str): the type's name.
        state (dict): attributes of rayrpc's own errors.
    """

    msg: str
    type_data: bytes
    type_name: str
    state: dict[str, Any]

    @property
    def exception_type(self) -> Any:
        """The exception's type (torch's name); None if it cannot be sent."""
        return pickle.loads(self.type_data) if self.type_data else None


def describe(
    error: BaseException,
    worker: WorkerInfo,
    encode: Callable[[Any], bytes],
    is_printed: bool = True,
) -> RemoteException:
    """Describe an error that a function raised on ``worker``.

    Frames of this package are left out; see ``_folded``.

    Args:
        error: the exception.
        worker: this worker.
        encode: pickles a type for the caller.
        is_printed: the text is also printed to this worker's stderr.
    """
    # the error's class may raise anything, SystemExit included, which must not hide the error
    try:
        trace = "".join(_folded(error).format())
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    text = f"On {worker}:\n{text_of(error, repr)}\n{trace}"
    if is_printed:
        with contextlib.suppress(BaseException):
            print(text, file=sys.stderr)
    return described_as(text, error, encode)


def described_as(
    text: str, error: BaseException, encode: Callable[[Any], bytes]
) -> RemoteException:
    """Describe an error by a text; ``encode`` pickles its type."""
    state = dict(vars(error)) if isinstance(error, RpcError) else {}
    try:
        pickle.dumps(state)
    except BaseException:
        state = {}
    kind = getattr(type(error), "_remote_type", type(error))
    try:
        type_data = encode(kind)
    except BaseException:
        type_data = b""
    return RemoteException(text, type_data, kind.__qualname__, state)


def _folded(error: BaseException) -> traceback.TracebackException:
    """Return an error's traceback, and those of its causes, without this package's frames.

    These frames stay if there are no others, and with the setting ``full_traceback``.
    """
    trace = traceback.TracebackException(type(error), error, error.__traceback__)
    if config.settings().full_traceback:
        return trace
    left = [trace]
    while left:
        each = left.pop()
        users = [frame for frame in each.stack if not frame.filename.startswith(_PACKAGE)]
        if users:
            each.stack = traceback.StackSummary.from_list(users)
        parts = (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ()))
        left += [part for part in parts if part is not None]
    return trace


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def _unescape(text: str) -> str:
    # repr() escaped the line breaks of the error's text
    return re.sub(r"\\([ntr\\'\"])", lambda found: _ESCAPES[found.group(1)], text)


_FRAME = re.compile(r'  File "(.+)", line (\d+), in ')


def _with_lines(text: str) -> str:
    """Return a traceback with the lines that only this process has: those of a notebook's cells."""
    lines = text.split("\n")
    shown = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        frame = _FRAME.match(line)
        if frame is None or following.startswith("    "):
            continue
        # in the cache alone: a file of this name here may be another one, or a pipe
        if frame.group(1) in linecache.cache:
            code = linecache.getline(frame.group(1), int(frame.group(2))).strip()
            shown += [f"    {code}"] * bool(code)
    return "\n".join(shown)


def rebuild(remote: RemoteException, keeps_type: bool) -> Exception:
    """Return the exception to raise at the caller.

    Args:
        remote: describes the error.
        keeps_type: the exception has the error's type; else that, and RuntimeError.
    """
    msg, _, type_name, state = remote
    message = _with_lines(_unescape(msg))
    try:
        kind = remote.exception_type
        if kind is None:
            raise TypeError(f"{type_name} cannot be sent")
        if issubclass(kind, RpcError):
            known: RpcError = kind.__new__(kind, message)
            known.args = (message,)
            vars(known).update(state)
            return known
        make: Any = kind
        if not keeps_type or issubclass(kind, torch.jit.Error):
            make = _also_runtime_error(make)
        error = make(message)
        if not isinstance(error, Exception):
            raise TypeError(f"{type_name} would end this thread")
    except BaseException as exc:
        failed = RuntimeError(
            f"Failed to create original exception type. Error msg was {text_of(exc)}"
            f" Original exception on remote side was {message}"
        )
        failed.__cause__ = exc
        return failed
    return error


@functools.lru_cache(1024)
def _also_runtime_error(kind: Any) -> Any:
    """Return a class of errors of a type that are RuntimeErrors, too, as torch's are."""
    if issubclass(kind, (RuntimeError, TypeError, ValueError)):
        return kind
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce__": _reduce,
        "_remote_type": kind,
    }
    if kind.__str__ is KeyError.__str__:  # it shows the repr of a text
        names["__str__"] = RuntimeError.__str__
    try:
        return type(kind)(kind.__name__, (kind, RuntimeError), names)
    except Exception:  # the class refuses to be inherited from
        return RuntimeError


def _reduce(error: Any) -> Any:
    return _remake, (error._remote_type, error.args), dict(vars(error))


def _remake(kind: Any, args: tuple[Any, ...]) -> Exception:
    error: Exception = _also_runtime_error(kind)(*args)
    return error
