"""Collect what the workers of one node print.

One thread accepts workers (see ``capture`` for what the two exchange), reads their pipes, and
delivers the texts.  It reads on when they are shown: so memory is bounded, and workers that print
faster wait.  The states of a worker's output:

    CONNECTED ── hello, BEGIN was delivered ──> READ ── both pipes at their end ──────> ENDED
                                                 │                                        ^
                                                 └── the worker's socket is closed ──> LEFT
                                                     CHILD_SECONDS later, or pipes at end ─┘

Texts that children of an ended worker print are delivered, too, until ``close``.
Torch and Ray are never imported here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from rayrpc._observe.stacks import dumped_stacks
from rayrpc.launch.capture import (
    CHILD_SECONDS,
    DUMP_SIGNAL,
    HELLO,
    LAST,
    STACKS,
    STATE_BYTES,
    SYNC,
    exit_status,
)
from rayrpc.launch.display import BEGIN, END, HOLD_OFF, STACKS_SHOWN, STATUS, Text

__all__ = ["Collector"]

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 16  # what a pipe holds: one read takes all that was there before it
HOLD_SECONDS = 0.1  # after that, an unfinished line is shown
ANSWER_SECONDS = 1.0  # for a worker's Python code to write its stacks
DUMP_SECONDS = 0.3  # for faulthandler to write them
MAX_DUMP_BYTES = 1 << 20
MAX_PATH_BYTES = 90  # of a socket; the system's limit is a little higher


class State(Enum):
    """The state of a worker's output; see the drawing above."""

    CONNECTED = "connected"
    READ = "read"
    LEFT = "left"
    ENDED = "ended"


class _Source:
    """The output of one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.phase = State.CONNECTED
        self.name = ""
        self.pid = 0
        self.pipes: dict[int, int] = {}  # fd of the worker by read end
        self.state: mmap.mmap | None = None
        self.held: dict[int, float] = {}  # since when a line is unfinished, by the worker's fd
        self.left_at = 0.0
        self.is_last = False  # the worker has closed its ends of the pipes
        self.dump = -1  # file that faulthandler writes to
        self.dump_at: float | None = None  # when to have faulthandler write the stacks
        self.dumped_at: float | None = None  # when it has written them

    def close(self) -> None:
        self.socket.close()
        for fd in (*self.pipes, self.dump):
            if fd >= 0:
                os.close(fd)
        if self.state is not None:
            self.state.close()


class Collector:
    """Accept workers of this node, and deliver what they print.

    Args:
        deliver (Callable): takes a list of ``Text``, and returns when it is shown; called in the
            collector's thread.
        by_line (bool): workers' unfinished lines are held back by the display.
        count (int): of the workers; after the last one, no other is accepted.
    """

    def __init__(self, deliver: Callable[[list[Text]], None], by_line: bool, count: int) -> None:
        self._deliver = deliver
        self._by_line = by_line
        self._expected = count
        self._sources: set[_Source] = set()
        self._batch: list[Text] = []
        self._read: set[_Source] = set()
        self._answers: list[tuple[_Source, bytes]] = []  # due when the batch is shown
        self._over: list[_Source] = []  # to be closed when the batch is shown
        self._closing = False
        self._wants_stacks = False
        self._folder = tempfile.mkdtemp(prefix="rayrpc-output-")
        if len(os.fsencode(self._folder)) > MAX_PATH_BYTES:
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="rayrpc-output-", dir="/tmp")
        #: path of the socket, in a folder of this user alone
        self.address = str(Path(self._folder) / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._run, name="rayrpc-output", daemon=True)
        self._thread.start()

    def ask_stacks(self) -> None:
        """Have all workers write where they are; ``STACKS_SHOWN`` is delivered for each."""
        self._wants_stacks = True
        self._wake()

    def close(self, timeout: float) -> None:
        """Deliver what is in the pipes, and stop.

        Args:
            timeout: how long to wait for that, in seconds.
        """
        self._closing = True
        self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has stopped
            self._wake_in.send(b"w")

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._on_time()
                self._finish_round()
            for source in list(self._sources):
                self._read_all(source)
            self._finish_round()
        finally:
            self._release()

    def _patience(self) -> float | None:
        """Return until when nothing is due, in seconds."""
        due = [since + HOLD_SECONDS for source in self._sources for since in source.held.values()]
        due += [s.left_at + CHILD_SECONDS for s in self._sources if s.phase is State.LEFT]
        due += [at for s in self._sources for at in (s.dump_at, s.dumped_at) if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _on_time(self) -> None:
        now = time.monotonic()
        for source in list(self._sources):
            if any(now >= since + HOLD_SECONDS for since in source.held.values()):
                self._show_held(source)
            if source.phase is State.LEFT and now >= source.left_at + CHILD_SECONDS:
                self._read_all(source)
                self._end(source)
            if source.dump_at is not None and now >= source.dump_at:
                source.dump_at = None
                source.dumped_at = now + DUMP_SECONDS
                with contextlib.suppress(OSError):
                    os.kill(source.pid, DUMP_SIGNAL)
            if source.dumped_at is not None and now >= source.dumped_at:
                self._on_dump(source)

    def _finish_round(self) -> None:
        """Deliver what was read; then it is shown, and workers that wait for that learn it."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._deliver(batch)
        for source in self._read:
            if source.state is not None and not source.held:
                source.state[0] = 0
        self._read.clear()
        answers, self._answers = self._answers, []
        for source, message in answers:
            self._send(source, message)
        while self._over:
            self._over.pop().close()

    def _on_wake(self) -> None:
        self._wake_out.recv(64)
        if self._wants_stacks:
            self._wants_stacks = False
            for source in self._sources:
                if source.phase is State.READ:
                    source.dump_at = time.monotonic() + ANSWER_SECONDS
                    self._send(source, STACKS)

    # -- workers ------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            source = _Source(connection)
            self._sources.add(source)
            handle = self._handler(self._on_message, source)
            self._selector.register(connection, selectors.EVENT_READ, handle)

    def _handler(self, handle: Callable[..., None], source: _Source, *args: Any) -> Any:
        """Return what handles an event of a source; its error ends that source alone."""

        def handler() -> None:
            try:
                handle(source, *args)
            except Exception:
                logger.exception("what worker %r prints is not shown any more", source.name)
                self._drop(source)

        return handler

    def _drop(self, source: _Source) -> None:
        ends: list[Any] = [*source.pipes, source.socket]
        for end in ends:
            with contextlib.suppress(KeyError, ValueError):  # it is closed
                self._selector.unregister(end)
        self._end(source)
        self._sources.discard(source)
        self._over.append(source)

    def _on_message(self, source: _Source) -> None:
        try:
            if source.phase is State.CONNECTED:
                self._on_hello(source)
                return
            received = source.socket.recv(64)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            received = b""
        if not received:
            self._on_left(source)
        for byte in received:
            if byte == SYNC[0]:
                self._read_all(source)
                self._show_held(source)
                self._answers.append((source, SYNC))
            elif byte == LAST[0]:
                source.is_last = True
                if source.phase is State.ENDED:
                    self._answers.append((source, LAST))
            elif byte == STACKS[0] and source.dump_at is not None:
                source.dump_at = None
                self._on_stacks(source)

    def _on_hello(self, source: _Source) -> None:
        close_on_exec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        hello, fds, _, _ = socket.recv_fds(source.socket, 4096, 4, close_on_exec)
        try:
            out, err, state, source.dump = fds
            source.name, source.pid = json.loads(hello)
            source.state = mmap.mmap(state, STATE_BYTES)
        except ValueError:
            for fd in fds:
                os.close(fd)
            raise
        os.close(state)
        source.phase = State.READ
        for read_end, fd in ((out, 1), (err, 2)):
            os.set_blocking(read_end, False)
            source.pipes[read_end] = fd
            handle = self._handler(self._read_pipe, source, read_end)
            self._selector.register(read_end, selectors.EVENT_READ, handle)
        # the display knows the worker before it prints
        self._batch.append(Text(source.name, 0, BEGIN))
        self._finish_round()
        self._send(source, HELLO)
        self._expected -= 1
        if not self._expected:
            self._selector.unregister(self._listener)
            self._stop_accepting()

    def _stop_accepting(self) -> None:
        # early, so that a process which is killed leaves no folder behind
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_left(self, source: _Source) -> None:
        self._selector.unregister(source.socket)
        source.socket.close()
        if source.phase is State.READ:
            source.phase = State.LEFT
            source.left_at = time.monotonic()
        self._forget_if_over(source)

    def _forget_if_over(self, source: _Source) -> None:
        if not source.pipes and source.socket.fileno() < 0:
            self._sources.discard(source)
            self._over.append(source)

    def _send(self, source: _Source, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone, or does not read
            source.socket.send(message)

    def _read_all(self, source: _Source) -> None:
        for read_end in list(source.pipes):
            self._read_pipe(source, read_end)

    def _on_dump(self, source: _Source) -> None:
        source.dumped_at = None
        dump = os.pread(source.dump, MAX_DUMP_BYTES, 0).decode(errors="replace")
        stacks = dumped_stacks(source.name, source.pid, dump)
        self._batch.append(Text(source.name, 2, stacks.encode(errors="replace")))
        self._on_stacks(source)

    def _on_stacks(self, source: _Source) -> None:
        self._read_all(source)
        self._show_held(source)
        self._batch.append(Text(source.name, 0, STACKS_SHOWN))

    def _read_pipe(self, source: _Source, read_end: int) -> None:
        if read_end not in source.pipes:
            return  # it ended in this round
        assert source.state is not None
        source.state[0] = 1
        self._read.add(source)
        try:
            data = os.read(read_end, PIPE_BYTES)
        except BlockingIOError:
            return
        fd = source.pipes[read_end]
        if data:
            self._batch.append(Text(source.name, fd, data))
            if self._by_line and not data.endswith((b"\n", b"\r")):
                source.held[fd] = time.monotonic()
            else:
                source.held.pop(fd, None)
            return
        self._selector.unregister(read_end)
        os.close(read_end)
        del source.pipes[read_end]
        if not source.pipes:
            self._end(source)
            self._forget_if_over(source)

    def _show_held(self, source: _Source) -> None:
        for fd in source.held:
            self._batch.append(Text(source.name, fd, HOLD_OFF))
        source.held.clear()
        self._read.add(source)

    def _end(self, source: _Source) -> None:
        if source.phase is not State.ENDED:
            source.phase = State.ENDED
            source.held.clear()
            if source.dumped_at is not None:
                self._on_dump(source)
            source.dump_at = None
            status = None if source.state is None else exit_status(source.state)
            if status is not None:
                self._batch.append(Text(source.name, STATUS, b"%d" % status))
            self._batch.append(Text(source.name, 0, END))
            if source.is_last:
                self._answers.append((source, LAST))

    def _release(self) -> None:
        for source in self._sources:
            source.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._stop_accepting()
