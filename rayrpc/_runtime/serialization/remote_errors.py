"""Errors of users' functions, from the callee to the caller.

As in torch, the caller raises an exception of the same type, made from one string: the worker, the
error and its traceback.  If the type cannot be made from one string, or not be imported, the caller
raises a RuntimeError with that string.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from rayrpc._protocol.ids import WorkerInfo
from rayrpc.errors import RpcError

__all__ = ["RemoteException", "describe", "rebuild"]


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


def describe(
    error: BaseException, worker: WorkerInfo, encode: Callable[[Any], bytes]
) -> RemoteException:
    """Describe an error that a function raised on ``worker``.

    The text is also printed to this worker's stderr.

    Args:
        error: the exception.
        worker: this worker.
        encode: pickles a type for the caller.
    """
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # a class with a broken __repr__ must not hide the error
    try:
        shown = repr(error)
    except Exception:
        shown = f"<{type(error).__qualname__} that cannot be shown>"
    text = f"On {worker}:\n{shown}\n{trace}"
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr)
    state = dict(vars(error)) if isinstance(error, RpcError) else {}
    try:
        pickle.dumps(state)
    except Exception:
        state = {}
    try:
        type_data = encode(type(error))
    except Exception:
        type_data = b""
    return RemoteException(text, type_data, type(error).__qualname__, state)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def _unescape(text: str) -> str:
    # repr() escaped the line breaks of the error's text
    return re.sub(r"\\([ntr\\'\"])", lambda found: _ESCAPES[found.group(1)], text)


def rebuild(msg: str, type_data: bytes, type_name: str, state: dict[str, Any]) -> Exception:
    """Return the exception to raise at the caller, for a ``RemoteException``."""
    message = _unescape(msg)
    try:
        kind = pickle.loads(type_data) if type_data else None
        if kind is None:
            raise TypeError(f"{type_name} cannot be sent")
        if issubclass(kind, RpcError):
            known: RpcError = kind.__new__(kind, message)
            known.args = (message,)
            vars(known).update(state)
            return known
        error = kind(message)
        if not isinstance(error, Exception):
            raise TypeError(f"{type_name} would end this thread")
    except BaseException as exc:
        failed = RuntimeError(
            f"Failed to create original exception type. Error msg was {exc}"
            f" Original exception on remote side was {message}"
        )
        failed.__cause__ = exc
        return failed
    return error
