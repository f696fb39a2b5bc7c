"""Ctrl-C: at each point of a function, one after the other, and where it wakes no thread."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import pytest
from simulation.scheduler import signal_points

__all__ = ["Strike", "interrupted", "interrupts_wait", "strikes"]


def interrupted(
    function: Callable[[], object],
    files: Collection[str | None],
    number: int,
    finalizers: bool = True,
) -> bool:
    """Raise KeyboardInterrupt where Python may run a signal's handler for the ``number``-th time.

    Args:
        function: is called.
        files: in whose code.
        number: from 1 on.
        finalizers: in those, too, where Python ignores the exception.

    Returns:
        Whether there are so many such places.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in signal_points(frame.f_code):
            if not finalizers and _is_in_finalizer(frame):
                return trace
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # first: Python 3.12 looks at it in ``settrace``
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


class Strike:
    """Interrupt a function at one point; call it once.

    Args:
        number (int): of the point; see ``interrupted``, as for the rest.
    """

    def __init__(self, number: int, files: Collection[str | None], finalizers: bool) -> None:
        self.number = number
        self._where = files, number, finalizers
        #: there are fewer points
        self.missed = True

    def __call__(self, function: Callable[[], object]) -> None:
        self.missed = not interrupted(function, *self._where)


@contextlib.contextmanager
def interrupts_wait(end: Callable[[], object]) -> Iterator[None]:
    """Send SIGINT to another thread while the main thread waits, and expect that to be ended.

    Python notes the signal, and no system call of the main thread ends: as if it had arrived just
    before the wait.

    Args:
        end: ends the wait of a test that fails.
    """
    ended = []
    timers = [
        threading.Timer(60, lambda: ended.append(end())),
        threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)),
    ]
    with pytest.raises(KeyboardInterrupt):
        for timer in timers:
            timer.start()
        yield
    for timer in timers:
        timer.cancel()
        timer.join()
    assert not ended


def strikes(
    files: Collection[str | None], finalizers: bool = True, step: int = 1
) -> Iterator[Strike]:
    """Yield a strike for each point, or each ``step``-th one, and one that misses."""
    for number in itertools.count(1, step):
        strike = Strike(number, files, finalizers)
        yield strike
        if strike.missed:
            return


def _is_in_finalizer(frame: FrameType | None) -> bool:
    # the second one is called by the garbage collector, which ignores its exceptions, too
    while frame is not None and frame.f_code.co_name not in ("__del__", "_on_collection"):
        frame = frame.f_back
    return frame is not None
