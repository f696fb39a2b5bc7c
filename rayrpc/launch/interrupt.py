"""End a run within 5 s of a Ctrl-C, whatever hangs.

Where ranks are waited for, the interrupt is noted and the ranks are ended.  If nothing catches the
KeyboardInterrupt, the process exits: by itself, or else in time by a timer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from types import TracebackType

__all__ = ["exit_in_time", "note_interrupt"]

END_SECONDS = 3.5
HARD_END_SECONDS = 4.2  # if no Python code can run
STATUS = 130  # of a shell, after a Ctrl-C

_noted_at: float | None = None
_hook_before = sys.excepthook


def note_interrupt() -> None:
    """Note that a wait for ranks was interrupted; a program that does not catch it must end."""
    global _noted_at, _hook_before
    _noted_at = time.monotonic()
    if sys.excepthook is not _on_uncaught:
        _hook_before = sys.excepthook
        sys.excepthook = _on_uncaught


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _hook_before(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        exit_in_time()


def exit_in_time() -> None:
    """Exit with status 130 if the interpreter has not ended 3.5 s after the interrupt."""
    now = time.monotonic()
    noted_at = now if _noted_at is None else _noted_at
    nowhere = os.open(os.devnull, os.O_WRONLY)  # stays open
    hard_end = max(1.0, noted_at + HARD_END_SECONDS - now)
    faulthandler.dump_traceback_later(hard_end, exit=True, file=nowhere)
    # threads and exit handlers that never end must not keep it
    timer = threading.Timer(max(0.5, noted_at + END_SECONDS - now), _exit)
    timer.daemon = True
    timer.start()


def _exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(STATUS)
