"""Measure rayrpc beside TensorPipe and Ray's own actor calls, in one run.

    python tests/benchmarks/bench_rpc.py [--quick] [--rounds N] [--only ROW,...]
                                         [--output FOLDER]

Every column is there all the time, and they take turns row by row, in another order each round;
so what else the machine does falls on all of them.  TensorPipe's processes, which poll, are
stopped while others are measured.  A result is the median over the rounds, a ratio the median of
the rounds' ratios.  Ratios are of times per call: above 1 is slower.

The raw actor call carries the bytes that rayrpc's call does, and gives them back unread.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_programs import PROGRAMS
from children import Child, ChildError, answer
from cluster import about_text, clean_up_on_sigterm, cluster, settle
from measures import MODELS, ROWS, Effort
from options import read_options
from report import Round, print_table, summary, write_chart, write_json

QUICK = Effort(seconds=0.3, warm_up=0.1, samples=3)
CHART = ("hosted", "attached", "raw-actor", "monarch")
BASE = "tensorpipe"


def main() -> None:
    """Read the command line, and measure or be one of the processes of a measurement."""
    options = read_options(__doc__, list(ROWS), others=[*PROGRAMS, *MODELS])
    if options.role:
        _play(options.role, options.address)
        return
    rows = _rows(options.only, options.quick)
    if not rows:
        return
    clean_up_on_sigterm()
    effort = QUICK if options.quick else Effort()
    with cluster() as about, columns() as children:
        print(about_text(about), flush=True)
        settle()
        rounds = [_round(number, rows, children, effort) for number in range(options.rounds)]
    _tell({"about": about, "rounds": rounds}, options)


def _rows(only: list[str] | None, quick: bool) -> list[str]:
    """Return the rows that are to be measured, without the references of others."""
    if only is None:
        only = [row for row in ROWS if not (quick and ROWS[row].memory)]
    rows = [row for row in only if ROWS[row].memory < _free_gb()]
    for row in only:
        if row not in rows:
            print(f"left out: {row}: less than {ROWS[row].memory} GB are free", file=sys.stderr)
    return [row for row in rows if row not in [ROWS[other].reference for other in rows]]


def _free_gb() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    return math.inf


def _play(role: str, address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end comes from the one that asks
    from peers import ROLES

    member: Any = ROLES[role](address)
    answer(
        member.setup,
        lambda question: member.measure(question["row"], Effort(**question["effort"])),
        member.close,
    )


# -- what runs ----------------------------------------------------------------------------------


@contextmanager
def columns() -> Iterator[dict[str, Child]]:
    """Run the processes of all columns; one that cannot be set up is left out, with a word."""
    from peers import PEERS

    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for role, peer in PEERS.items():
            children[role] = Child(role, rests=peer.spins)
            stack.callback(children[role].close)
        for role, child in list(children.items()):
            try:
                child.wait_ready()
            except ChildError as exc:
                print(f"left out: {exc}", file=sys.stderr)
                del children[role]
        yield children


def _round(number: int, rows: list[str], children: dict[str, Child], effort: Effort) -> Round:
    results: Round = {}
    roles = list(children)
    for turn, row in enumerate(rows):
        shift = (number + turn) % len(roles)
        for role in roles[shift:] + roles[:shift]:
            for each in filter(None, (row, ROWS[row].reference)):
                column = results.setdefault(each, {})
                try:
                    column[role] = children[role].ask({"row": each, "effort": asdict(effort)})
                except ChildError as exc:
                    print(f"no {each}: {exc}", file=sys.stderr)
    return results


def _tell(report: dict[str, Any], options: argparse.Namespace) -> None:
    from peers import PEERS

    against = {role: peer.against for role, peer in PEERS.items()}
    references = {name: row.reference for name, row in ROWS.items() if row.reference}
    report.update(summary(report["rounds"], ROWS, against, references))
    print_table(report, ROWS)
    if options.output:
        write_json(report, options.output / "rpc.json")
        titles = {role: PEERS[role].title for role in (BASE, *CHART)}
        write_chart(report, ROWS, titles, options.output / "rpc.png")


if __name__ == "__main__":
    main()
