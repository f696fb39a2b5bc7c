"""Measure whole programs: the same script on TensorPipe and on rayrpc, taking turns.

    python tests/benchmarks/bench_programs.py [--quick] [--rounds N] [--only ROW,...]
                                              [--output FOLDER]

``python script.py`` and ``rayrpc run script.py``, the latter on a cluster that is there already.
The programs themselves tell how much they did in how much time; so starting them does not count.
A result is the median over the rounds, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from cluster import ROOT, about_text, clean_up_on_sigterm, cluster, settle
from measures import MODELS, ROWS, Quantity
from options import read_options
from report import Round, print_table, summary, write_json

__all__ = ["AGAINST", "COLUMNS", "PROGRAMS", "free_port"]

RUN_SECONDS = 300.0  # a run that takes longer has failed
SHOWN_LINES = 15  # of one that has


class ProgramError(RuntimeError):
    """A program failed; the message says how."""


@dataclass(frozen=True)
class Program(Quantity):
    """A script that is run.

    Args:
        script: relative to the root.
        arguments: of it.
        length: option that says how long it goes on.
        amount, quick_amount: values of that.
        result: pattern of what it prints: an amount, and the seconds that this took.
    """

    script: str
    arguments: tuple[str, ...]
    length: str
    amount: int
    quick_amount: int
    result: str


PROGRAMS = {
    "cartpole": Program(
        "CartPole, steps of the environments",
        "/s",
        "examples/cartpole.py",
        ("--stop-reward", "inf", "--target", "0"),
        length="--max-iterations",
        amount=40,
        quick_amount=3,
        result=r"episodes, (\d+) steps, .* in ([\d.]+) s$",
    ),
    "parameter-server": Program(
        "parameter server, updates",
        "/s",
        "examples/parameter_server.py",
        ("--min-accuracy", "0"),
        length="--steps",
        amount=3000,
        quick_amount=300,
        result=r"^async: (\d+) updates in ([\d.]+) s ",
    ),
}
COLUMNS = {
    "tensorpipe": (sys.executable,),
    "rayrpc": (sys.executable, "-m", "rayrpc", "run"),
}
AGAINST = {"tensorpipe": (), "rayrpc": ("tensorpipe",)}


def main() -> None:
    """Read the command line and measure."""
    options = read_options(__doc__, list(PROGRAMS), others=[*ROWS, *MODELS])
    rows = list(PROGRAMS) if options.only is None else options.only
    if not rows:
        return
    clean_up_on_sigterm()
    with cluster() as about, tempfile.TemporaryDirectory(prefix="rb-") as folder:
        print(about_text(about), flush=True)
        rounds = [_round(number, rows, options.quick, folder) for number in range(options.rounds)]
    report = {"about": about, "rounds": rounds, **summary(rounds, PROGRAMS, AGAINST)}
    print_table(report, PROGRAMS)
    if options.output:
        write_json(report, options.output / "programs.json")


def _round(number: int, rows: list[str], quick: bool, folder: str) -> Round:
    results: Round = {row: {} for row in rows}
    for turn, row in enumerate(rows):
        columns = list(COLUMNS)
        if (number + turn) % 2:
            columns.reverse()
        for column in columns:
            settle()
            try:
                results[row][column] = _run(PROGRAMS[row], COLUMNS[column], quick, folder)
            except ProgramError as exc:
                print(f"no {row}: {column}: {exc}", file=sys.stderr)
    return results


def _run(program: Program, command: tuple[str, ...], quick: bool, folder: str) -> float:
    """Return how much the program did in a second."""
    amount = program.quick_amount if quick else program.amount
    arguments = (*program.arguments, program.length, str(amount))
    process = subprocess.Popen(
        [*command, str(ROOT / program.script), *arguments],
        cwd=folder,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"it did not end in {RUN_SECONDS:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.wait()
    found = re.search(program.result, output, re.MULTILINE)
    if process.returncode or not found:
        last = "\n".join(output.splitlines()[-SHOWN_LINES:])
        raise ProgramError(f"exit status {process.returncode}\n{last}")
    return float(found[1]) / float(found[2])


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
