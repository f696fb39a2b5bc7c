"""The origin of this process: read from its place among the processes of ``multiprocessing``.

A root is a process that a user started by hand; a rank is one that a program started.

    root ──(multiprocessing, any start method)──> rank   inherits the authentication key
    root ──(a hosted worker)──> rank                     ``enter``
    root ──(any other Python process)──> rank            ``enter_subprocess``
    rank ──(either)──> rank                              inherits the origin of its root

What ``multiprocessing`` hands down to every child is the configuration of the process object: the
authentication key, random in each root, and here the origin that a hosted worker has entered.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import multiprocessing
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rayrpc._protocol.origin import Origin

__all__ = ["count_ranks", "enter", "enter_subprocess", "origin_of_ranks", "this_origin"]

_ENTRY = "rayrpc_origin"  # in the configuration of a process object
_SPAWNED = "--multiprocessing-fork"  # the last argument of a spawned child
_UNCOUNTED = 0  # ranks of an origin whose starter does not count them

_lock = threading.Lock()
_hosted_ranks = 0  # that this process has started, and that have not ended


def this_origin() -> Origin:
    """Return the origin of this process, with the processes counted now."""
    inherited = _config().get(_ENTRY)
    parent = multiprocessing.parent_process()
    if inherited is None:
        root = _root() if parent is None else _root()._replace(pid=parent.pid or 0)
    else:
        root = Origin(*inherited)
        if root.ranks == _UNCOUNTED:
            root = root._replace(ranks=_count_siblings(_is_of_same_script))
    started = _count_started()
    if parent is not None:
        return root._replace(launched=True, ranks=_count_siblings(_is_alike), started=started)
    return root._replace(started=started)


def origin_of_ranks() -> Origin:
    """Return the origin of the hosted workers that this process starts."""
    return this_origin()._replace(launched=True, ranks=_count_started(), started=0)


def enter(origin: Origin) -> None:
    """Give this process, a hosted worker, the origin that its starter found for it."""
    _config()[_ENTRY] = tuple(origin)  # plain, for children without rayrpc


def enter_subprocess(origin: Origin) -> None:
    """Give this process, which is no child of ``multiprocessing``, the origin of its starter."""
    if multiprocessing.parent_process() is None:
        enter(origin._replace(launched=True, ranks=_UNCOUNTED, started=0))


def count_ranks(change: int) -> None:
    """Count hosted workers that were started as ranks, or have ended (negative)."""
    global _hosted_ranks
    with _lock:
        _hosted_ranks += change


def _config() -> dict[str, Any]:
    process: Any = multiprocessing.current_process()
    config: dict[str, Any] = process._config
    return config


def _root() -> Origin:
    authkey = bytes(multiprocessing.current_process().authkey)
    return Origin(
        user=_user(),
        host=socket.gethostname(),
        loopback=_loopback(),
        program=_program(),
        pid=os.getpid(),
        run=hashlib.sha256(b"rayrpc run " + authkey).hexdigest()[:12],
    )


def _program() -> str:
    program = sys.argv[0] if sys.argv else ""
    return os.path.abspath(program) if os.path.isfile(program) else program


def _user() -> str:
    with contextlib.suppress(ImportError, KeyError):  # no such module, no such user
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def _loopback() -> str:
    """Return the identity of this host's loopback network: containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        identity = f"{socket.gethostname()} {uuid.getnode()}"
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _count_started() -> int:
    """Return how many processes and hosted ranks this process has started that still run."""
    return len(multiprocessing.active_children()) + _hosted_ranks


def _count_siblings(is_alike: Callable[[list[str], list[str]], bool]) -> int:
    """Return how many processes like this one its parent has started, itself included."""
    parent = psutil.Process().parent()
    mine = _arguments(psutil.Process())
    siblings = [] if parent is None else parent.children()
    return max(1, sum(is_alike(_arguments(each), mine) for each in siblings))


def _arguments(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return list(process.cmdline())
    return []


def _is_alike(arguments: list[str], mine: list[str]) -> bool:
    """Tell whether two children are of one start method; helper processes are of none."""
    if mine[-1:] == [_SPAWNED]:
        return arguments[-1:] == [_SPAWNED]
    return arguments == mine


def _is_of_same_script(arguments: list[str], mine: list[str]) -> bool:
    """Tell whether two processes run the same script, whatever its arguments: one is the rank."""
    count = len(sys.argv) - 1
    script = mine[:-count] if count and mine[-count:] == sys.argv[1:] else mine
    return bool(script) and arguments[: len(script)] == script
