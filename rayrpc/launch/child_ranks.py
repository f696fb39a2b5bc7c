"""Ranks that are child processes, started by ``torch.multiprocessing``, and their end by Ctrl-C.

After a Ctrl-C, a rank writes where it was and ends.  A rank that hangs in C code cannot: its parent
has faulthandler write its stacks, and kills it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessContext

from rayrpc._concurrency.deadlines import Deadline
from rayrpc.launch.capture import DUMP_SIGNAL
from rayrpc.launch.interrupt import note_interrupt

__all__ = ["ChildContext", "spawn", "start_processes"]

EXIT_SECONDS = 1.5  # after a Ctrl-C, for ranks to end by themselves
DUMP_SECONDS = 0.5  # for faulthandler to write the stacks of a rank
KILL_SECONDS = 1.0

# Kept from import time: later, ours is in its place.
_mp: Any = torch.multiprocessing
_start_torch_processes = _mp.start_processes


class _RankMain:
    """A rank's main, which writes where it was interrupted.

    Args:
        fn (Callable): called as ``fn(rank, *args)``.
    """

    def __init__(self, fn: Callable[..., object]) -> None:
        self._fn = fn

    def __call__(self, rank: int, *args: Any) -> None:
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=False)  # the main thread gets it
        try:
            self._fn(rank, *args)
        except KeyboardInterrupt as exc:
            trace = exc.__traceback__
            frames = traceback.format_tb(trace.tb_next if trace is not None else None)
            header = f"\n-- Process {rank} (pid {os.getpid()}) was at:\n"
            sys.stderr.write(header + "".join(frames))  # one text, not mixed with other ranks'
            sys.stderr.flush()
            faulthandler.unregister(DUMP_SIGNAL)
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
            raise


class ChildContext(ProcessContext):
    """The processes of one ``spawn``; a Ctrl-C ends them.

    Args:
        processes (list[Process]): one for each rank.
        error_files (list[str]): where each writes its error.

    Source: ``torch.multiprocessing.spawn.ProcessContext``.
    """

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for ranks to end; the first that fails ends them all.

        Args:
            timeout, grace_period: see ``RankContext.join``.

        Returns:
            True if all ranks have ended well; False if some still run.

        Raises:
            ProcessRaisedException, ProcessExitedException: a rank failed.
            KeyboardInterrupt: a Ctrl-C; the ranks were ended.

        Source: ``torch.multiprocessing.spawn.ProcessContext.join``.
        """
        try:
            return bool(super().join(timeout, grace_period))
        except KeyboardInterrupt:
            note_interrupt()
            self._end_all()
            raise

    def _end_all(self) -> None:
        self._join_procs_with_timeout(EXIT_SECONDS)
        hanging = [process for process in self.processes if process.is_alive()]
        for process in hanging:
            os.kill(process.pid, DUMP_SIGNAL)
        deadline = Deadline(DUMP_SECONDS if hanging else 0.0)
        for process in hanging:
            process.join(deadline.remaining())
        for process in hanging:
            process.kill()
        self._join_procs_with_timeout(KILL_SECONDS)


def start_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ChildContext | None:
    """Start ranks as torch does; a Ctrl-C ends them with a traceback of where each was.

    Args:
        fn, args, nprocs, join, daemon, start_method: see ``torch.multiprocessing``.

    Returns:
        None if ``join``, else a context to join.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank failed.

    Source: ``torch.multiprocessing.start_processes``.
    """
    started = _start_torch_processes(_RankMain(fn), args, nprocs, False, daemon, start_method)
    make: Any = ChildContext
    context: ChildContext = make(started.processes, started.error_files)
    if not join:
        return context
    while not context.join():
        pass
    return None


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ChildContext | None:
    """Start ranks as ``torch.multiprocessing.spawn`` does; see ``start_processes``.

    Source: ``torch.multiprocessing.spawn``.
    """
    return start_processes(fn, args, nprocs, join, daemon, start_method)
