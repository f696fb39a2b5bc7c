"""Mark, in what a worker prints, for which cell of a notebook it was printed.

The calls that a notebook makes carry the cell that made them, and so do the calls that they make
(see ``cell_hook``).  A worker's stdout and stderr are pipes; marks in them are around each text
that was printed for such a call:

    ESC ] rayrpc:CELL BEL  text  ESC ] rayrpc: BEL

Text without marks is for the cell that runs when it is shown.  That is text of calls without a
cell, and all that is written past Python's ``sys.stdout``, by C code and child processes.

Torch and Ray are never imported here.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from rayrpc.launch.display import END, HOLD_OFF, Text

__all__ = ["CellWriter", "Splitter", "calling_cell", "within_cell"]

#: the cell for which a thread, or a coroutine, of this worker runs; empty: none is known
calling_cell: ContextVar[str] = ContextVar("rayrpc_calling_cell", default="")

_BEGIN, _END = "\x1b]rayrpc:", "\x07"
_NO_CELL = _BEGIN + _END
_MARK = re.compile(rb"\x1b]rayrpc:([^\x07\x1b]{0,64})\x07")
_MOST_BYTES = len(_BEGIN) + 64  # of a mark without its end


class CellWriter(io.TextIOWrapper):
    """A stdout or stderr that marks for which cell each text is.

    Args:
        fd (int): 1 or 2; stays open.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(
            io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )

    def write(self, text: str, /) -> int:
        """Write a text, with its marks."""
        cell = calling_cell.get()
        if not cell or not text:
            return super().write(text)
        super().write(f"{_BEGIN}{cell}{_END}{text}{_NO_CELL}")  # at once, as other threads write
        return len(text)


@contextlib.contextmanager
def within_cell(cell: str) -> Iterator[None]:
    """Have this thread, or coroutine, run for a cell."""
    token = calling_cell.set(cell)
    try:
        yield
    finally:
        calling_cell.reset(token)


class _Stream:
    """One descriptor of one worker."""

    def __init__(self) -> None:
        self.cell = ""  # that of the text to come
        self.last = ""  # that of the last text
        self.rest = b""  # of a mark whose end has not come yet


class Splitter:
    """Split what workers print by cell, and take out the marks."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], _Stream] = {}

    def split(self, texts: Iterable[Text]) -> list[tuple[str, Text]]:
        """Return texts with the cells that they are for; a note about a worker is for none.

        Where a worker's text goes on for another cell, ``HOLD_OFF`` ends that of the one before.
        """
        parts: list[tuple[str, Text]] = []
        for text in texts:
            if text.fd in (1, 2):
                stream = self._streams.setdefault((text.worker, text.fd), _Stream())
                parts += self._parts(stream, text)
                continue
            if text.data == END:
                for fd in (1, 2):
                    ended = self._streams.pop((text.worker, fd), None)
                    if ended is not None and ended.rest:
                        parts.append((ended.cell, Text(text.worker, fd, ended.rest)))
            parts.append(("", text))
        return parts

    def _parts(self, stream: _Stream, text: Text) -> Iterator[tuple[str, Text]]:
        worker, fd, data = text
        if data is None:
            yield stream.last, text
            return
        data = stream.rest + data
        end = _unfinished_mark(data)
        stream.rest = data[end:]
        at = 0
        for mark in [*_MARK.finditer(data, 0, end), None]:
            if part := data[at : end if mark is None else mark.start()]:
                if stream.last != stream.cell:
                    yield stream.last, Text(worker, fd, HOLD_OFF)
                    stream.last = stream.cell
                yield stream.cell, Text(worker, fd, part)
            if mark is not None:
                stream.cell = mark.group(1).decode(errors="replace")
                at = mark.end()


def _unfinished_mark(data: bytes) -> int:
    """Return where a mark begins whose end is not there yet; the length of ``data`` if none."""
    at = data.rfind(b"\x1b")
    rest = data[at:]
    begin = _BEGIN.encode()
    is_mark = rest[: len(begin)] == begin[: len(rest)] and _END.encode() not in rest
    return at if at >= 0 and is_mark and len(rest) <= _MOST_BYTES else len(data)
