"""Where the code of users is in this process, as text and as data."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rayrpc._concurrency.frames import frames_of_threads

__all__ = ["dumped_stacks", "place_of", "python_stacks", "set_waits", "users_stack"]

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"
_FRAME = re.compile('  File "(.*?)", line ')


def users_stack(frames: Iterable[tuple[FrameType, int]]) -> list[dict[str, Any]]:
    """Return a thread's stack from the first function of a user on; rayrpc's frames are left out.

    Args:
        frames: the thread's, with the lines they are at, the innermost first.

    Returns:
        By frame, the innermost last: ``file``, ``line``, ``function``, ``text`` (the source), and
        ``users``: whether it is a user's, and not the standard library's.  Empty if no function of
        a user runs.
    """
    stack = _from_users(_summaries(frames))
    return [
        {
            "file": each.filename,
            "line": each.lineno,
            "function": each.name,
            "text": each.line,
            "users": _is_users(each.filename),
        }
        for each in stack
    ]


def place_of(stack: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost place in a user's code, as text; empty: there is none.

    Args:
        stack: see ``users_stack``.
    """
    frame = next((each for each in reversed(stack) if each["users"]), None)
    return f"{frame['file']}:{frame['line']}, in {frame['function']}" if frame is not None else ""


# Returns, by ident, what threads wait for; see ``set_waits``.
_waits: Callable[[], Mapping[int, Sequence[str]]] = dict


def set_waits(waits: Callable[[], Mapping[int, Sequence[str]]] | None) -> None:
    """Have ``python_stacks`` tell which calls threads wait for.

    Args:
        waits: returns texts by the thread's ident; None: this process is no worker any more.
    """
    global _waits
    _waits = waits or dict


def python_stacks(name: str, main: int) -> str:
    """Return where this process's main is, and other threads that run users' functions.

    Frames of rayrpc are left out.  Threads that wait for calls are listed with what they wait for.

    Args:
        name (str): of the worker.
        main (int): ident of the thread that runs its main.
    """
    found = []
    waits: Mapping[int, Sequence[str]] = {}
    with contextlib.suppress(Exception):  # the worker may just be shut down
        waits = _waits()
    for ident, frames in frames_of_threads().items():
        stack = _summaries(frames)
        if (users := _from_users(stack)) or ident == main:
            calls = [f"  waits for {each}\n" for each in waits.get(ident, ())]
            found.append("".join([*traceback.format_list(users or stack), *calls]))
    return _text(name, os.getpid(), found)


def _summaries(frames: Iterable[tuple[FrameType, int]]) -> list[traceback.FrameSummary]:
    """Return what is shown of frames, the innermost last."""
    return list(traceback.StackSummary.extract(iter(frames)))[::-1]


def _from_users(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return a stack from the first function of a user on, without rayrpc's; none: it has none."""
    first = next((i for i, entry in enumerate(stack) if _is_users(entry.filename)), len(stack))
    return [each for each in stack[first:] if not each.filename.startswith(_PACKAGE)]


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
