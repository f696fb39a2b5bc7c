"""What a rank prints, on its way to the terminal of the process that started it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any, TextIO

__all__ = ["Capture", "follow"]

Chunk = tuple[int, bytes]


class Capture:
    """Take all that this process writes to its stdout and stderr, also by C code and children."""

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
        while chunk := os.read(read_end, 1 << 16):
            self._chunks.put((fd, chunk))
        os.close(read_end)

    def take(self) -> list[Chunk] | None:
        """Return what was written, as soon as there is some; None at the end."""
        chunk = self._chunks.get()
        if chunk is None:
            self._chunks.put(None)  # for who asks again
            return None
        chunks = [chunk]
        while len(chunks) < 256:
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                break
            if chunk is None:
                self._chunks.put(None)
                break
            chunks.append(chunk)
        return chunks

    def close(self, patience: float = 2.0) -> None:
        """Pass on what is left, then mark the end."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        for reader in self._readers:
            reader.join(patience)  # a child that still holds the pipe must not hold us
        self._chunks.put(None)


def _writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def follow(actor: Any, get: Any, prefix: str = "") -> threading.Thread:
    """Write what a rank prints to this process's stdout and stderr, until its end.

    Args:
        actor: with a method ``read_output``.
        get: waits for its result (``ray.get``).
        prefix: put before every line; none: the bytes go through as they are.
    """

    begun = {1: b"", 2: b""}  # lines without an end, where lines get a prefix

    def write(fd: int, chunk: bytes) -> None:
        if prefix:
            whole, newline, begun[fd] = (begun[fd] + chunk).rpartition(b"\n")
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
                chunks = None  # it died; whoever waits for it learns of that by itself
            if chunks is None:
                break
            for fd, chunk in chunks:
                write(fd, chunk)
        for fd, rest in begun.items():
            if rest:
                write(fd, b"\n")

    thread = threading.Thread(target=run, name="rayrpc-output", daemon=True)
    thread.start()
    return thread
