"""The cells of a Jupyter notebook: which one runs here, and how a text is shown in one.

A kernel publishes what is written to its ``sys.stdout`` with the header of the request that it is
for: the request to run one cell, once.  For a frontend that is where the output belongs.
Source: Jupyter's messaging protocol; ``OutStream`` of ipykernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rayrpc.launch.cell_marks import Splitter
from rayrpc.launch.display import END, Display, Text, write

__all__ = ["NotebookDisplay", "cell_here", "has_kernel", "ipython_shell", "shown_in"]

_kernel_id = uuid.uuid4().hex[:8]  # other notebooks may call the same workers
_numbers = itertools.count(1)
_cells: dict[str, str] = {}  # by id of the request
_headers: dict[str, dict[str, Any]] = {}  # of the request, by cell


def ipython_shell() -> Any:
    """Return the InteractiveShell of IPython; None: this process has none."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def has_kernel() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    return getattr(ipython_shell(), "kernel", None) is not None


def cell_here() -> str:
    """Return the cell that this thread runs, or was started by; empty: none is known."""
    for stream in (sys.stdout, sys.stderr):  # one may be redirected
        header = getattr(stream, "parent_header", None)
        if isinstance(header, dict) and "msg_id" in header:
            request = header["msg_id"]
            cell = _cells.get(request)
            if cell is None:
                cell = _cells.setdefault(request, f"{_kernel_id}.{next(_numbers)}")
                _headers[cell] = header
            return cell
    return ""


@contextlib.contextmanager
def shown_in(cell: str) -> Iterator[None]:
    """Have what this thread prints shown in a cell.

    Args:
        cell: as ``cell_here`` has returned it; any other one: the cell that runs.
    """
    header = _headers.get(cell)
    tokens = []
    if header is not None:
        for stream in (sys.stdout, sys.stderr):
            # the stream's own method would change the cell for all threads
            parent = getattr(stream, "_parent_header", None)
            if isinstance(parent, contextvars.ContextVar):
                tokens.append((parent, parent.set(header)))
    try:
        yield
    finally:
        for parent, token in tokens:
            parent.reset(token)


class NotebookDisplay:
    """Show texts in the cells that they are for; see ``Display``.

    Args:
        prefixes (dict[str, str]): by worker.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = prefixes
        self._splitter = Splitter()
        self._displays: dict[str, Display] = {}

    def show(self, texts: Iterable[Text]) -> list[Text]:
        """Show texts; return them without the marks of cells, when they are written."""
        parts = self._splitter.split(texts)
        for cell, several in itertools.groupby(parts, key=lambda part: part[0]):
            shown = [text for _, text in several]
            self._display(cell).show(shown)
            for ended in (text for text in shown if text.data == END and text.fd == 0):
                for display in self._displays.values():
                    display.show([ended])
        return [text for _, text in parts]

    def _display(self, cell: str) -> Display:
        if cell not in self._displays:
            self._displays[cell] = Display(self._prefixes, functools.partial(_write_in, cell))
        return self._displays[cell]


def _write_in(cell: str, fd: int, text: str) -> None:
    # in a context without the cell that has started this thread
    contextvars.Context().run(_write_here, cell, fd, text)


def _write_here(cell: str, fd: int, text: str) -> None:
    with shown_in(cell):
        write(fd, text)
