"""Tell an interactive user what a program waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

__all__ = ["noticed"]

NOTICE_SECONDS = 2.0


@contextlib.contextmanager
def noticed(text: str | Callable[[], str]) -> Iterator[None]:
    """Write a line to a terminal, or a notebook, if what is done meanwhile takes 2 s or longer.

    Output that goes elsewhere, into a file or a pipe, stays as it is.

    Args:
        text (str or Callable): what is waited for; a function returns it, in another thread.
    """
    if not _is_interactive():
        yield
        return
    timer = threading.Timer(NOTICE_SECONDS, _write, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_interactive() -> bool:
    if hasattr(sys.modules.get("__main__"), "get_ipython"):
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _write(text: str | Callable[[], str]) -> None:
    with contextlib.suppress(Exception):  # the terminal may be gone
        what = text if isinstance(text, str) else text()
        print(f"rayrpc: waiting for {what}", file=sys.stderr, flush=True)
