"""Run the tests that a change has to pass, or all of them.

The unit tests run in a process without Ray, those with Ray or processes in two that have a cluster
each. Of the latter at most five that fail run once more, each alone, in a new process with a new
cluster: if they all pass then, so does the gate, and its last lines name them as flaky.

    python tests/gate.py            what a change has to pass: all tests but the slow ones
    python tests/gate.py --all      all tests, with new random seeds, and the leak check at the end
    python tests/gate.py --strict   without a second chance; so does STRICT=1
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gating.post_mortem import machine_state
from gating.supervisor import Report, Share, run_tests, stop

SLOWEST = 20
MOST_AGAIN = 5  # failed tests that run again


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="the slow tests, too")
    parser.add_argument("--strict", action="store_true", help="no second chance")
    options, rest = parser.parse_known_args(arguments)
    strict = options.strict or os.environ.get("STRICT", "") not in ("", "0")
    if options.all:
        os.environ["TESTS_ALL"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    print(machine_state(), flush=True)
    units, others = run_all(rest, "" if options.all else " and not slow")
    print(f"\n{machine_state()}")

    def run_one(test: str) -> Report:
        return run_tests(rest, only=[test])

    return conclude(units, others, None if strict else run_one, time.monotonic() - start)


def run_all(arguments: list[str], which: str) -> tuple[Report, Report]:
    """Run the unit tests, and in two processes those with Ray or processes.

    Args:
        arguments: of pytest.
        which: added to the marks of each.

    Returns:
        The outcomes of both.
    """
    units, others = Report(), Report()

    def run_share(name: str) -> None:
        if name == "first":
            # one that does not end is ended, too; the others then go on
            units.add(run_tests([*arguments, "-m", f"unit{which}"], ends_at_failure=False))
        share = Share(Path(claims), name)
        found = run_tests([*arguments, "-m", f"not unit{which}"], share=share)
        with adding:
            others.add(found)

    adding = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="rr-claims-") as claims:
        threads = [threading.Thread(target=run_share, args=(n,)) for n in ("first", "second")]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C, or SIGTERM
            stop()  # for good: failed tests would get no second chance
            for thread in threads:
                thread.join()
            raise
    return units, others


def conclude(
    units: Report, others: Report, run_one: Callable[[str], Report] | None, seconds: float
) -> int:
    """Give failed tests their second chance, and print what is to be known at last.

    Args:
        units: the outcomes of the unit tests, which get no second chance.
        others: the outcomes of tests with Ray or processes.
        run_one: runs one of these alone; None: they get none either.
        seconds: that the tests have taken.

    Returns:
        The exit status.
    """
    taken = units.seconds | others.seconds
    of_files: dict[str, float] = collections.defaultdict(float)
    for test, spent in taken.items():
        of_files[test.partition("::")[0]] += spent
    for what, times in (("tests", taken), ("files", of_files)):
        print(f"the {SLOWEST} slowest {what}:")
        for name in sorted(times, key=times.__getitem__, reverse=True)[:SLOWEST]:
            print(f"  {times[name]:6.1f} s  {name}")
    sys.stdout.flush()
    failed = units.failed + others.failed
    errors = [report.error for report in (units, others) if report.error]
    flaky: list[str] = []
    if len(others.failed) > MOST_AGAIN:
        errors.append(f"more than {MOST_AGAIN} tests failed: none has a second chance")
    if run_one is not None and not (units.failed or errors):
        flaky = second_chance(others.failed, run_one)
    failed = [test for test in failed if test not in flaky]
    for test in failed:
        print(f"FAILED {test}")
    for error in errors:
        print(f"ERROR {error}")
    for test in flaky:
        print(f"flaky: {test} (its failure is above; alone, it passed)")
    passed = units.count("passed") + others.count("passed") + len(flaky)
    skipped = units.count("skipped") + others.count("skipped")
    print(f"the tests took {seconds / 60:.1f} min")
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped", flush=True)
    return 1 if failed or errors else 0


def second_chance(failed: list[str], run_one: Callable[[str], Report]) -> list[str]:
    """Run failed tests again, each alone; return those that pass."""
    passed = []
    for test in failed:
        print(f"\nonce more, alone: {test}", flush=True)
        again = run_one(test)
        if again.outcomes.get(test) == "passed":
            passed.append(test)
    return passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
