"""Where RRefs were made, for messages and lists."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from rayrpc._runtime.invocation import user_function

__all__ = ["made_text", "users_frame", "users_line"]

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def users_frame() -> FrameType | None:
    """Return the innermost frame on the stack that is not rayrpc's; None: all are."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def users_line() -> tuple[str, int] | None:
    """Return the file and the line of the innermost function on the stack that is not rayrpc's."""
    frame = users_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def made_text(made: object) -> str:
    """Return where a value was made, as ``at FILE:LINE`` or ``by FUNCTION``; empty: not known.

    Args:
        made: the file and the line; or the function that ``remote`` has called; None: not known.
    """
    if made is None:
        return ""
    if isinstance(made, tuple):
        return f"at {made[0]}:{made[1]}"
    name = user_function(made)
    return f"by {name}" if name else ""
