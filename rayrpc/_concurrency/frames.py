"""The frames of other threads, read while those threads run."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["collection_paused", "frames_of_threads", "local"]

# Python 3.11 makes a frame's object when it is asked for, and may collect garbage for that.  A
# finalizer then lets other threads run, the frame returns, and Python writes to what was its
# memory.  And until 3.11.8 sys._current_frames() holds a lock meanwhile, for which such a thread
# waits with the GIL when it starts one: a deadlock (CPython's issue 106883).  Until 3.10 frames
# always were objects; from 3.12 on no allocation collects garbage.
_COLLECTS_IN_WALK = sys.version_info[:2] == (3, 11)
_lock = threading.RLock()  # a signal's handler may walk as well


def frames_of_threads() -> dict[int, list[tuple[FrameType, int]]]:
    """Return other threads' frames with the lines they are at, the innermost first, by ident.

    The calling thread has none: its own would be held by what it is given.
    """
    me = threading.get_ident()
    with collection_paused():
        return {
            ident: list(traceback.walk_stack(frame)) if ident != me else []
            for ident, frame in sys._current_frames().items()
        }


def local(frame: FrameType, name: str) -> Any:
    """Return a local variable of a frame; None: it has none of that name yet."""
    with collection_paused():
        return frame.f_locals.get(name)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python from collecting garbage while frames of other threads are read.

    No effect where collections are safe then; see above.
    """
    if not _COLLECTS_IN_WALK:
        yield
        return
    with _lock:
        # not gc.disable(): programs look at gc.isenabled() to set it back later
        thresholds = gc.get_threshold()
        gc.set_threshold(0)
        paused = gc.get_threshold()
        try:
            yield
        finally:
            if gc.get_threshold() == paused:  # else the program has set others meanwhile
                gc.set_threshold(*thresholds)
