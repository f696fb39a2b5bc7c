"""Carry what a rank prints to the terminal of the process that started it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["Capture", "follow"]

Chunk = tuple[int, bytes]  # file descriptor (1 or 2), text
MAX_CHUNKS = 256  # that one `take` returns
MAX_CHUNK_BYTES = 1 << 16


class Capture:
    """Capture what this process writes to its stdout and stderr, also by C code and children.

    File descriptors 1 and 2 become pipes until ``close``; a thread reads each of them.
    """

    def __init__(self) -> None:
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._readers = []
        for fd in (1, 2):
            read_end, write_end = os.pipe()
            os.dup2(write_end, fd)
            os.close(write_end)
            reader = threading.Thread(target=self._read, args=(read_end, fd), daemon=True)
            reader.start()
            self._readers.append(reader)
        sys.stdout = _writer(1)
        sys.stderr = _writer(2)

    def _read(self, read_end: int, fd: int) -> None:
        while chunk := os.read(read_end, MAX_CHUNK_BYTES):
            self._chunks.put((fd, chunk))
        os.close(read_end)

    def take(self) -> list[Chunk] | None:
        """Wait for output, and return it.

        Returns:
            Chunks in the order in which they were written to each descriptor; None after the
            end, also to every later call.
        """
        chunk = self._chunks.get()
        if chunk is None:
            self._chunks.put(None)  # for later calls
            return None
        chunks = [chunk]
        while len(chunks) < MAX_CHUNKS:
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                break
            if chunk is None:
                self._chunks.put(None)
                break
            chunks.append(chunk)
        return chunks

    def close(self, timeout: float = 2.0) -> None:
        """Restore stdout and stderr; ``take`` then returns the rest, and None.

        Args:
            timeout (float): for each of the two, how long to wait in seconds until no child
                process has it open any more.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        for reader in self._readers:
            reader.join(timeout)
        self._chunks.put(None)


def _writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def follow(actor: Any, get: Callable[[Any], Any], prefix: str = "") -> threading.Thread:
    """Write what a rank prints to this process's stdout and stderr, until the rank ends.

    Args:
        actor (ActorHandle): has a method ``read_output``, which returns what ``Capture.take`` does.
        get (Callable): waits for its result (``ray.get``).
        prefix (str): put before every line; empty: chunks are written as they come.

    Returns:
        threading.Thread: the one that writes; it ends when all is written.
    """
    unfinished = {1: b"", 2: b""}  # lines without their end, if there is a prefix

    def write(fd: int, chunk: bytes) -> None:
        if prefix:
            whole, newline, unfinished[fd] = (unfinished[fd] + chunk).rpartition(b"\n")
            chunk = b"".join(mark + line + b"\n" for line in whole.split(b"\n")) if newline else b""
        stream = sys.stdout if fd == 1 else sys.stderr
        stream.write(chunk.decode("utf-8", "replace"))
        stream.flush()

    mark = prefix.encode()

    def run() -> None:
        while True:
            try:
                chunks = get(actor.read_output.remote())
            except Exception:
                chunks = None  # the actor died; its `run` or `join_group` reports that
            if chunks is None:
                break
            for fd, chunk in chunks:
                write(fd, chunk)
        for fd, rest in unfinished.items():
            if rest:
                write(fd, b"\n")

    thread = threading.Thread(target=run, name="rayrpc-output", daemon=True)
    thread.start()
    return thread
