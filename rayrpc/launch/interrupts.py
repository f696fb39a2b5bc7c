"""A Ctrl-C that is not lost, wherever in Ray it finds the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["check_ctrl_c", "remember_ctrl_c"]

_came = False


def _handle(number: int, frame: Any) -> None:
    global _came
    _came = True
    signal.default_int_handler(number, frame)


@contextmanager
def remember_ctrl_c() -> Iterator[None]:
    """Note a Ctrl-C: an exception that is raised inside of a callback of Ray's goes no further."""
    global _came
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    _came = False
    signal.signal(signal.SIGINT, _handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_ctrl_c() -> None:
    """Raise KeyboardInterrupt if one came and was lost since ``remember_ctrl_c``."""
    global _came
    if _came and threading.current_thread() is threading.main_thread():
        _came = False
        raise KeyboardInterrupt
