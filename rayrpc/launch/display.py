"""Write what workers print to this process's stdout and stderr."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

__all__ = ["BEGIN", "Display", "END", "HOLD_OFF", "STACKS_SHOWN", "STATUS", "Text", "write"]

# In place of text:
HOLD_OFF = None  # show the unfinished line
# ... for descriptor 0:
BEGIN, END, STACKS_SHOWN = b"begin", b"end", b"stacks"
STATUS = -1  # a descriptor: its text is what the worker has given to os._exit

_LINE = re.compile("[^\r\n]*(?:\r\n|\r|\n)")


class Text(NamedTuple):
    """What a worker wrote, in its order; or a note about the worker.

    Args:
        worker (str): its name.
        fd (int): 1 or 2; 0 for a note; ``STATUS``.
        data (bytes | None): text; ``HOLD_OFF``; or a note: ``BEGIN``, ``END``, ``STACKS_SHOWN``.
    """

    worker: str
    fd: int
    data: bytes | None


class _Stream:
    """One descriptor of one worker."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.held = ""  # a line without its end


class Display:
    """Show texts, with a prefix before each line where one is given.

    With a prefix, a line is shown when it ends (by LF, CR or both) or when it is asked for.  Text
    without a prefix is shown as it comes.

    Args:
        prefixes (dict[str, str]): by worker; none: "".
        write_text (Callable): takes 1 or 2, and a text; default: this process's stdout and stderr.
    """

    def __init__(
        self, prefixes: Mapping[str, str], write_text: Callable[[int, str], None] | None = None
    ) -> None:
        self._prefixes = prefixes
        self._write = write_text or write
        self._streams: dict[tuple[str, int], _Stream] = {}
        # by descriptor of this process
        self._open: dict[int, _Stream | None] = {1: None, 2: None}  # whose line is unfinished
        self._returned: dict[int, _Stream | None] = {1: None, 2: None}  # whose line ended by CR

    def show(self, texts: Iterable[Text]) -> None:
        """Show texts; return when they are written."""
        pending: list[str] = []
        pending_fd = 0
        for worker, fd, data in texts:
            if fd not in (1, 2):
                if data == END:
                    for each in (1, 2):
                        self._flush(pending_fd, pending)
                        pending_fd, pending = each, [self._end(worker, each)]
                continue
            if fd != pending_fd:
                self._flush(pending_fd, pending)
                pending_fd, pending = fd, []
            pending.append(self._shown(self._stream(worker, fd), fd, data))
        self._flush(pending_fd, pending)

    def _flush(self, fd: int, pending: list[str]) -> None:
        if text := "".join(pending):
            self._write(fd, text)

    def _stream(self, worker: str, fd: int) -> _Stream:
        key = (worker, fd)
        if key not in self._streams:
            self._streams[key] = _Stream(self._prefixes.get(worker, ""))
        return self._streams[key]

    def _shown(self, stream: _Stream, fd: int, data: bytes | None) -> str:
        """Return what is to be written now."""
        text = "" if data is None else stream.decode(data)
        if not stream.prefix:
            return text
        text = stream.held + text
        end = 0
        parts = []
        for match in _LINE.finditer(text):
            parts.append(self._line(stream, fd, match.group()))
            end = match.end()
        stream.held = text[end:]
        if data is None and stream.held:
            parts.append(self._begun(stream, fd, stream.held, moves_on=False))
            self._open[fd] = stream
            stream.held = ""
        return "".join(parts)

    def _line(self, stream: _Stream, fd: int, line: str) -> str:
        is_open = self._open[fd] is stream
        returned = self._returned[fd] is stream
        if line == "\r" and not is_open:
            return ""  # it would go to where the line begins
        if line == "\n" and returned and not is_open:  # the rest of CR LF
            self._returned[fd] = None
            return line
        shown = self._begun(stream, fd, line, moves_on=line.endswith("\n"))
        self._open[fd] = None
        self._returned[fd] = None if line.endswith("\n") else stream
        return shown

    def _begun(self, stream: _Stream, fd: int, text: str, moves_on: bool) -> str:
        """Return a text with what must be before it.

        Args:
            stream: whose it is.
            fd: where it is shown.
            text: a line, or a part of one.
            moves_on: leave another's progress bar where it is, else write over it.
        """
        if self._open[fd] is stream:
            return text
        others = self._returned[fd]
        breaks = self._open[fd] is not None or (moves_on and others not in (None, stream))
        return ("\n" if breaks else "") + stream.prefix + text

    def _end(self, worker: str, fd: int) -> str:
        """Return the rest of what a worker wrote, and the end of its line."""
        stream = self._stream(worker, fd)
        rest = stream.decode(b"", True)
        if not stream.prefix:
            return rest
        stream.held += rest
        shown = self._shown(stream, fd, None)
        if self._open[fd] is stream:
            self._open[fd] = None
            shown += "\n"
        return shown


def write(fd: int, text: str) -> None:
    """Write a text to this process's stdout (``fd`` is 1) or stderr (2)."""
    stream = sys.stdout if fd == 1 else sys.stderr
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except Exception:
        return  # it is closed, or nobody reads it any more: workers must not wait for that
