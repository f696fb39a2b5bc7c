"""The errors of calls that end without a reply."""

from __future__ import annotations

from rayrpc.errors import CallError, CallTimeoutError

__all__ = ["shut_down", "timed_out"]


def timed_out(timeout: float | None) -> CallTimeoutError:
    """Return the error of a call that took longer than its timeout in seconds."""
    if timeout is None:
        return CallTimeoutError("the caller of this RPC stopped waiting for its reply")
    # torch's text; programs look for it
    return CallTimeoutError(
        f"RPC ran for more than set timeout ({round(timeout * 1000)} ms) and will now be marked "
        "with an error"
    )


def shut_down() -> CallError:
    """Return the error of a call that its own worker's shutdown has ended."""
    return CallError("RPC was shut down on this worker before the call completed")
