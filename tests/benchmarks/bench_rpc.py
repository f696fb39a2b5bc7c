"""Measure rayrpc beside TensorPipe and Ray's own actor calls, in one run.

    python tests/benchmarks/bench_rpc.py [--quick] [--rounds N] [--only ROW,...]
                                         [--json FILE] [--plot FILE]

Every column is there all the time, and they take turns row by row, in another order each round;
so what else the machine does falls on all of them.  A result is the median over the rounds, a
ratio the median of the rounds' ratios.  Ratios are of times per call: above 1 is slower.

The raw actor call carries the bytes that rayrpc's call does, and gives them back unread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from children import Child, ChildError, answer
from measures import ROWS, Effort
from report import print_table, write_plot

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CLUSTER_CPUS = 4
QUICK = Effort(seconds=0.3, warm_up=0.1, samples=3)

Round = dict[str, dict[str, float]]  # by row, by column


def main() -> None:
    """Read the command line, and measure or be one of the processes of a measurement."""
    options = _options()
    if options.role:
        _play(options.role, options.address)
        return
    _clean_up_on_sigterm()
    rows = [row for row in ROWS if not options.only or row in options.only]
    rounds = 1 if options.quick else options.rounds
    with cluster() as about, columns() as children:
        print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
        results = [
            _round(number, rows, children, QUICK if options.quick else Effort())
            for number in range(rounds)
        ]
    report = {"about": about, "rounds": results, **_summary(results)}
    print_table(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        write_plot(report, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", metavar="ROW[,ROW]", type=_rows, help=f"of {', '.join(ROWS)}")
    parser.add_argument("--json", metavar="FILE", help="write all results")
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart (PNG)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rows(text: str) -> list[str]:
    rows = text.split(",")
    for row in rows:
        if row not in ROWS:
            raise argparse.ArgumentTypeError(f"no row {row!r}; there are {', '.join(ROWS)}")
    return rows


def _clean_up_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


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
def cluster() -> Iterator[dict[str, str]]:
    """Run a Ray cluster that children join; gives what there is to know about the run."""
    folder = tempfile.mkdtemp(prefix="rb-")
    paths = [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_TMPDIR"] = folder
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    try:
        ray.init(
            num_cpus=CLUSTER_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        _clean_up_on_sigterm()  # Ray's own handler aborts
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        yield _about()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _about() -> dict[str, str]:
    sys.path.insert(0, str(ROOT))
    import rayrpc

    return {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ray": metadata.version("ray"),
        "rayrpc": rayrpc.__version__,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def columns() -> Iterator[dict[str, Child]]:
    """Run the processes of all columns; one that cannot be set up is left out, with a word."""
    from peers import PEERS

    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for role in PEERS:
            children[role] = Child(role)
            stack.callback(children[role].close)
        for role, child in list(children.items()):
            try:
                child.wait_ready()
            except ChildError as exc:
                print(f"left out: {exc}", file=sys.stderr)
                del children[role]
        yield children


def _round(number: int, rows: list[str], children: dict[str, Child], effort: Effort) -> Round:
    results: Round = {row: {} for row in rows}
    roles = list(children)
    for turn, row in enumerate(rows):
        shift = (number + turn) % len(roles)
        for role in roles[shift:] + roles[:shift]:
            try:
                results[row][role] = children[role].ask({"row": row, "effort": asdict(effort)})
            except ChildError as exc:
                print(f"no {row}: {exc}", file=sys.stderr)
    return results


def _summary(results: list[Round]) -> dict[str, Any]:
    """Return medians by row and column, and ratios by row, column and what it is against."""
    from peers import PEERS

    medians: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for row in results[0]:
        measured = [each[row] for each in results]
        values = {role: [each[role] for each in measured if role in each] for role in PEERS}
        medians[row] = {role: statistics.median(some) for role, some in values.items() if some}
        ratios[row] = {}
        for role, peer in PEERS.items():
            for other in peer.against:
                both = [each for each in measured if role in each and other in each]
                if both:
                    ratios[row][f"{role}/{other}"] = statistics.median(
                        ROWS[row].cost(each[role]) / ROWS[row].cost(each[other]) for each in both
                    )
    return {"medians": medians, "ratios": ratios}


if __name__ == "__main__":
    main()
