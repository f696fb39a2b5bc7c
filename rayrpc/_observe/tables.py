"""Tables and times, for a terminal and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["aligned", "as_html", "duration", "size"]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has no rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in (list(header), *rows)]


def as_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in HTML."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def duration(seconds: float) -> str:
    """Return a time for people: ``0.31 s``, ``12.4 s``, ``7 min 12 s``, ``3 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Return a number of bytes for people: ``312 B``, ``4.2 kB``, ``37 MB``, ``1.4 GB``."""
    value, unit = count, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "B" and value < 9.95 else f"{value:.0f} {unit}"
