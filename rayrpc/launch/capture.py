"""Capture what a worker's process prints, for the collector of its node.

File descriptors 1 and 2 become pipes, and the collector gets their read ends (``SCM_RIGHTS``).  So
what was written outlives this process, a full pipe blocks whoever writes, and C code and child
processes are included.  On a UNIX socket the two exchange single bytes:

    worker's process                          collector
      hello: name, pid, pipes, state, dump ─>
      <─────────────────────────────── HELLO  from now on it reads the pipes
      SYNC ────────────────────────────────>  reads what is in the pipes, has it shown
      <──────────────────────────────── SYNC
      <────────────────────────────── STACKS  the driver was interrupted
      writes its stacks to descriptor 2
      STACKS ──────────────────────────────>
      LAST: it has closed its ends ─────────>  reads until children have closed theirs, too
      <──────────────────────────────── LAST

The state is shared memory.  Its first byte is 1 while the collector has read text that is not shown
yet: with empty pipes and a 0 there, ``sync`` has nothing to wait for, and sends nothing.  Behind it
is the status of a worker that has called ``os._exit``, which Ray does not tell.  The dump is a file
for faulthandler, if the worker's Python code cannot run.

Torch and Ray are never imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import io
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from typing import NoReturn

from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Event, Notifier
from rayrpc._observe.stacks import python_stacks
from rayrpc.launch.cell_marks import CellWriter

__all__ = [
    "CHILD_SECONDS",
    "Capture",
    "DUMP_SIGNAL",
    "HELLO",
    "LAST",
    "STACKS",
    "STATE_BYTES",
    "SYNC",
    "exit_status",
]

HELLO, SYNC, STACKS, LAST = b"h", b"s", b"t", b"l"
STATE_BYTES = mmap.PAGESIZE
_EXIT = struct.Struct("<?i")  # whether the worker has called os._exit, and with which status
_EXIT_AT = 1

# Has faulthandler write the stacks of a process whose Python code does not run.
DUMP_SIGNAL = signal.SIGQUIT

CONNECT_SECONDS = 10.0
LINE_BUFFERED = 1  # _IOLBF of stdio.h
CHILD_SECONDS = 2.0  # for children that have the output open
SYNC_SECONDS = 10.0  # while the terminal accepts nothing, calls are held up for so long


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Capture:
    """Give what this process writes to its stdout and stderr to a collector, until ``close``.

    Args:
        address (str): path of the collector's socket.
        name (str): of the worker.
        marks_cells (bool): mark for which cell of a notebook each text is.

    Raises:
        OSError: the collector cannot be reached; stdout and stderr are as before.
    """

    def __init__(self, address: str, name: str, marks_cells: bool = False) -> None:
        self._name = name
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._asked = self._answered = 0
        self._stalled = self._closed = False
        self._last = Event()  # children have closed the output, too
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pipes = []
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(address)
            pipes = [os.pipe(), os.pipe()]
            with tempfile.TemporaryFile() as file:
                file.truncate(STATE_BYTES)
                self._state = mmap.mmap(file.fileno(), STATE_BYTES)
                hello = json.dumps([name, os.getpid()]).encode()
                ends = [read_end for read_end, _ in pipes]
                files = [file.fileno(), self._dump.fileno()]
                socket.send_fds(self._socket, [hello], [*ends, *files])
            if self._socket.recv(1) != HELLO:
                raise ConnectionError("the collector of output closed the connection")
        except OSError:
            self._dump.close()
            self._socket.close()
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            raise
        self._socket.settimeout(None)
        self._redirect([write_end for _, write_end in pipes], marks_cells)
        # PyDLL keeps the GIL: to give it up takes longer than this call does
        self._poll = ctypes.PyDLL(None).poll
        self._polled = (_PollFd * 2)(*[_PollFd(end, select.POLLIN, 0) for end, _ in pipes])
        self._polled_at = ctypes.byref(self._polled)
        self._note_exit()
        faulthandler.register(DUMP_SIGNAL, file=self._dump, all_threads=True)
        os.register_at_fork(after_in_child=self._socket.close)
        threading.Thread(target=self._serve, name="rayrpc-output", daemon=True).start()

    def _note_exit(self) -> None:
        """Have ``os._exit`` leave its status in the state."""
        process, leave, state = os.getpid(), os._exit, self._state

        @functools.wraps(leave)
        def note_and_leave(status: int) -> NoReturn:
            if os.getpid() == process:  # and no forked child
                _EXIT.pack_into(state, _EXIT_AT, True, status)
            leave(status)

        os._exit = note_and_leave

    def _redirect(self, write_ends: list[int], marks_cells: bool) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        for fd, write_end in zip((1, 2), write_ends, strict=True):
            os.dup2(write_end, fd)
            os.close(write_end)
        writer = CellWriter if marks_cells else _writer
        sys.stdout, sys.stderr = writer(1), writer(2)
        self._flush_out, self._flush_err = sys.stdout.flush, sys.stderr.flush
        # line by line, as in a terminal; C code's buffer would else be lost when the process ends
        libc = ctypes.CDLL(None)
        with contextlib.suppress(ValueError):
            stdout = ctypes.c_void_p.in_dll(libc, "stdout")
            libc.setvbuf(stdout, None, LINE_BUFFERED, ctypes.c_size_t(0))

    def sync(self) -> None:
        """Wait until all that this process has written is shown."""
        try:  # the next four lines are in the way of every call
            self._flush_out()
            self._flush_err()
        except ValueError:
            pass  # the program has closed one
        # the pipes first: the collector sets the state before it reads
        if self._poll(self._polled_at, 2, 0) or self._state[0]:
            self._wait_until_shown()

    def _wait_until_shown(self) -> None:
        release_reader()
        with self._lock:
            if self._stalled or self._closed:
                return
            self._asked += 1
            ticket = self._asked
            try:
                self._socket.sendall(SYNC)
            except OSError:
                return
            except BaseException:  # an interrupt: a number without an answer would stall all others
                with contextlib.suppress(OSError):
                    self._socket.sendall(SYNC)
                raise
        done = self._changed.wait_until(
            lambda: self._answered >= ticket or self._closed or self._stalled, SYNC_SECONDS
        )
        if not done:
            with self._lock:  # until it answers, no other call waits for it
                self._stalled = self._answered < ticket

    def _serve(self) -> None:
        """Handle what the collector sends."""
        while True:
            try:
                received = self._socket.recv(64)
            except OSError:
                received = b""
            with self._lock:
                if not received:
                    self._closed = True
                answered = self._answered + received.count(SYNC)
                self._answered = min(answered, self._asked)  # an interrupted question is sent twice
                if self._answered >= self._asked:
                    self._stalled = False
            self._changed.notify_all()
            if not received or LAST in received:
                self._last.set()
            if not received:
                return
            if STACKS in received:
                os.write(2, python_stacks(self._name, self._main).encode(errors="replace"))
                with contextlib.suppress(OSError):
                    self._socket.sendall(STACKS)

    def close(self) -> None:
        """Restore stdout and stderr, and wait until all is shown that was captured."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be the program's own
                stream.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        with contextlib.suppress(OSError):
            self._socket.sendall(LAST)
            self._last.wait(CHILD_SECONDS)
        self._wait_until_shown()


def exit_status(state: mmap.mmap) -> int | None:
    """Return the status that a worker has given to ``os._exit``; None if it has not called it."""
    has_left, status = _EXIT.unpack_from(state, _EXIT_AT)
    return status if has_left else None


def _writer(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
