"""The errors of calls that end without a reply."""

from __future__ import annotations

from rayrpc._runtime.invocation import user_function
from rayrpc.errors import CallError, CallTimeoutError, CancelledError

__all__ = ["cancelled", "name_of", "shut_down", "timed_out"]


def name_of(func: object, worker: str) -> str:
    """Return the name of a user's call for messages; empty for a call of rayrpc itself.

    Args:
        func: what it runs; None: it fetches a value.
        worker: name of the callee.
    """
    if func is None:
        return f"a fetch from RPC worker {worker!r}"
    name = user_function(func)
    return f"the call of {name} on RPC worker {worker!r}" if name else ""


def timed_out(timeout: float | None) -> CallTimeoutError:
    """Return the error of a call that took longer than its timeout in seconds."""
    if timeout is None:
        return CallTimeoutError("the caller of this RPC stopped waiting for its reply")
    # torch's text; programs match it
    return CallTimeoutError(
        f"RPC ran for more than set timeout ({round(timeout * 1000)} ms) and will now be marked "
        "with an error"
    )


def cancelled(func: object, worker: str) -> CancelledError:
    """Return the error of a call that was cancelled.

    Args:
        func: what it runs; None: it fetches a value.
        worker: name of the callee.
    """
    name = name_of(func, worker) or f"the call of rayrpc on RPC worker {worker!r}"
    return CancelledError(f"{name} was cancelled")


def shut_down() -> CallError:
    """Return the error of a call that its own worker's shutdown has ended."""
    return CallError("RPC was shut down on this worker before the call completed")
