"""Whether two processes run the same program, so that they share ``__main__``."""

from __future__ import annotations

import functools
import hashlib
import sys
import uuid
from pathlib import Path

__all__ = ["main_identity"]


@functools.cache
def main_identity() -> str:
    """Return a string that is equal in two processes whose ``__main__`` is the same file.

    If it is equal, functions and classes of ``__main__`` are pickled by reference; else, and in
    notebooks and consoles, by value.
    """
    main = sys.modules.get("__mp_main__") or sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "get_ipython", None) is not None:
        return f"interactive-{uuid.uuid4().hex}"
    file = Path(path)
    try:
        source = file.read_bytes()
    except OSError:
        return f"{file.name}-{uuid.uuid4().hex}"
    return f"{file.name}-{hashlib.sha256(source).hexdigest()[:16]}"
