"""Where the code of users is in a worker's process, as text."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

__all__ = ["dumped_stacks", "python_stacks"]

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"
_FRAME = re.compile('  File "(.*?)", line ')


def python_stacks(name: str, main: int) -> str:
    """Return where this process's main is, and other threads that run users' functions.

    Args:
        name (str): of the worker.
        main (int): ident of the thread that runs its main.
    """
    found = []
    for ident, frame in sys._current_frames().items():
        stack = traceback.extract_stack(frame)
        first = next((i for i, entry in enumerate(stack) if _is_users(entry.filename)), None)
        if first is not None or ident == main:
            found.append("".join(traceback.format_list(stack[first or 0 :])))
    return _text(name, os.getpid(), found)


def dumped_stacks(name: str, pid: int, dump: str) -> str:
    """Return the part of faulthandler's dump where users' functions run.

    Args:
        name (str): of the worker.
        pid (int): its process.
        dump (str): of all threads.
    """
    threads = [text.partition("\n")[2] for text in dump.strip().split("\n\n")]
    found = [text for text in threads if any(map(_is_users, _FRAME.findall(text)))]
    found = found or [text for text in threads if _FRAME.search(text)]
    return _text(name, pid, [f"  (most recent call first)\n{text.rstrip()}\n" for text in found])


def _text(name: str, pid: int, found: list[str]) -> str:
    header = f"\n-- Worker {name} (pid {pid}) was at:\n"
    return header + "and in another thread at:\n".join(found or ["  no function of a user\n"])


def _is_users(filename: str) -> bool:
    """Tell whether a file is neither of rayrpc, nor of Ray or the standard library."""
    if filename.startswith("<frozen") or f"{_SITE}ray{os.sep}" in filename:
        return False
    if filename.startswith(_PACKAGE):
        return False
    return _SITE in filename or not filename.startswith(_LIBRARY)
