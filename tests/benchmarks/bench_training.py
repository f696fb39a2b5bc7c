"""Measure training with distributed autograd: the same script on TensorPipe and on rayrpc.

    python tests/benchmarks/bench_training.py [--quick] [--rounds N] [--only ROW,...]
                                              [--output FOLDER]

Both are started, and then take turns of a few steps, while the other waits; TensorPipe's processes,
which poll while they wait, are stopped then.  A machine that others use, too, is fast in one minute
and slow in the next: so close together, turns can be compared.  A result is the median over all
turns, a ratio the median of the turns' ratios.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bench_programs import AGAINST, COLUMNS, PROGRAMS, free_port
from cluster import FOLDER, about_text, clean_up_on_sigterm, cluster, settle
from measures import MODELS, ROWS
from options import read_options
from report import Round, print_table, summary, write_json

TURNS, QUICK_TURNS = 40, 4  # in each round
STEPS = 20  # in each turn
START_SECONDS = 120.0
TURN_SECONDS = 60.0
END_SECONDS = 30.0


def main() -> None:
    """Read the command line and measure."""
    options = read_options(__doc__, list(MODELS), others=[*ROWS, *PROGRAMS])
    rows = list(MODELS) if options.only is None else options.only
    if not rows:
        return
    turns = QUICK_TURNS if options.quick else TURNS
    clean_up_on_sigterm()
    rounds: list[Round] = []
    with cluster() as about, tempfile.TemporaryDirectory(prefix="rb-") as folder:
        print(about_text(about), flush=True)
        for _ in range(options.rounds):
            for row in rows:
                rounds += _turns(row, turns, Path(folder))
    report = {"about": about, "rounds": rounds, **summary(rounds, MODELS, AGAINST)}
    print_table(report, MODELS)
    if options.output:
        write_json(report, options.output / "training.json")


def _turns(row: str, count: int, folder: Path) -> list[Round]:
    """Return the results of so many turns of each program, who begin by turns, too."""
    turns: list[Round] = []
    with contextlib.ExitStack() as stack:
        programs = {c: stack.enter_context(_program(row, c, folder)) for c in COLUMNS}
        settle()
        for number in range(count):
            columns = list(COLUMNS)[:: -1 if number % 2 else 1]
            turns.append({row: {column: programs[column].take_turn() for column in columns}})
    return turns


class _Program:
    """A script that trains when it is its turn."""

    def __init__(self, process: subprocess.Popen[bytes], lines: IO[str], rests: bool) -> None:
        self._process = process
        self._lines = lines
        self._rests = rests
        lines.readline()  # it is ready
        self.signal(signal.SIGSTOP)

    def take_turn(self) -> float:
        """Return how many steps it does in a second."""
        self.signal(signal.SIGCONT)
        print(STEPS, flush=True, file=self._lines)
        rate = float(self._lines.readline())
        self.signal(signal.SIGSTOP)
        return rate

    def signal(self, number: int) -> None:
        """Send a signal to its processes, if they are to rest between turns."""
        if self._rests:
            os.killpg(self._process.pid, number)


@contextmanager
def _program(row: str, column: str, folder: Path) -> Iterator[_Program]:
    path = folder / f"{column}.sock"
    path.unlink(missing_ok=True)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (folder / f"{column}.txt").open("w+b") as output,
    ):
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(START_SECONDS)
        model = row.removeprefix("autograd-")
        process = subprocess.Popen(
            [*COLUMNS[column], str(FOLDER / "training.py"), model, "--turns", str(path)],
            cwd=folder,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            connection, _ = listener.accept()
            connection.settimeout(TURN_SECONDS)
            with connection, connection.makefile("rw") as lines:
                program = _Program(process, lines, rests=column == "tensorpipe")
                try:
                    yield program
                finally:
                    program.signal(signal.SIGCONT)
            process.wait(END_SECONDS)
        except BaseException:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
                process.wait()


if __name__ == "__main__":
    main()
