"""The call for whose function a thread, or a coroutine, runs; and what interrupts them."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

__all__ = ["current_call", "is_interrupt"]

#: a ``ServedCall``; None: there is none
current_call: ContextVar[Any] = ContextVar("rayrpc_current_call", default=None)


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is an interrupt of this thread, wherever it was raised.

    That is Ctrl-C in the main thread, and the cancellation of the call for which a thread runs.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    call = current_call.get()
    return isinstance(error, asyncio.CancelledError) and call is not None and call.is_cancelled
