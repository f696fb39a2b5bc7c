"""The errors of calls that end without a reply."""

from __future__ import annotations

from rayrpc._runtime.invocation import user_function
from rayrpc.errors import CallError, CallTimeoutError, CancelledError

__all__ = ["cancelled", "shut_down", "timed_out"]


def timed_out(timeout: float | None) -> CallTimeoutError:
    """Return the error of a call that took longer than its timeout in seconds."""
    if timeout is None:
        return CallTimeoutError("the caller of this RPC stopped waiting for its reply")
    # torch's text; programs look for it
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
    name = "of a fetch" if func is None else f"of {user_function(func) or 'rayrpc'}"
    return CancelledError(f"the call {name} on RPC worker {worker!r} was cancelled")


def shut_down() -> CallError:
    """Return the error of a call that its own worker's shutdown has ended."""
    return CallError("RPC was shut down on this worker before the call completed")
