"""The options that both benchmarks take, so that one ``make bench ARGS=...`` serves them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["read_options"]

ROUNDS = 3


def read_options(
    description: str | None, rows: Sequence[str], others: Sequence[str] = ()
) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: of the program.
        rows: what it measures.
        others: what its sibling measures: may be named in ``--only``, and is no business of it.

    Returns:
        ``only`` (rows, in their order), ``rounds``, ``quick``, ``output``; ``role`` and ``address``
        of a process that the program has started.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, or 1 if quick")
    parser.add_argument("--quick", action="store_true", help="short measures; not the largest ones")
    parser.add_argument("--only", metavar="ROW[,ROW]", help=f"of {', '.join(rows)}")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="write what comes out there")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    if options.only is not None:
        named = options.only.split(",")
        for name in named:
            if name not in [*rows, *others]:
                parser.error(f"no row {name!r}; there are {', '.join([*rows, *others])}")
        options.only = [row for row in rows if row in named]
    return options
