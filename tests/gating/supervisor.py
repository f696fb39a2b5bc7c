"""Run tests in processes of pytest that end with the first failure, and go on in a new one.

What a failed test leaves (workers, a wedged cluster, a thread that waits for ever) then harms no
other test, and a test that no signal ends is ended from outside:

    start pytest ──(all tests ended)──────────> done
      ^    ├──(a test failed)──> end what is left of its processes ──┐
      │    └──(a test takes too long)──> describe, kill ─────────────┤
      └───────────────────── without the tests that have ended <─────┘

What pytest prints is printed when its process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gating.post_mortem import FOLDER, describe, end_processes

__all__ = ["Limits", "Report", "Share", "run_tests", "stop"]

ROOT = Path(__file__).resolve().parents[2]
SAY_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds, and how many failures to bear.

    Args:
        collect: for the first test to begin.
        test: for a test to end; pytest's own limit should be lower.
        end: for pytest to end after its last test.
        failures: with more, the rest is not run.
    """

    collect: float = 400.0
    test: float = 360.0
    end: float = 60.0
    failures: int = 5


@dataclass(frozen=True)
class Share:
    """A share of tests, which others run at the same time.

    Args:
        claims: the folder in which all of them claim files of tests.
        name: of this one.
    """

    claims: Path
    name: str


@dataclass
class Report:
    """The outcomes of tests, by their ids.

    Args:
        error: why not all tests were run; empty if they were.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def count(self, outcome: str) -> int:
        """Return the number of tests that passed, failed or were skipped."""
        return sum(each == outcome for each in self.outcomes.values())

    def add(self, other: Report) -> None:
        """Add the outcomes of other tests."""
        self.outcomes |= other.outcomes
        self.seconds |= other.seconds
        self.error = "; ".join(filter(None, [self.error, other.error]))

    @property
    def failed(self) -> list[str]:
        """The ids of the tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]


_is_stopping = threading.Event()
_printing = threading.Lock()


def stop() -> None:
    """Have all runs end their processes, and return."""
    _is_stopping.set()


def run_tests(
    arguments: Sequence[str],
    *,
    only: Iterable[str] | None = None,
    share: Share | None = None,
    ends_at_failure: bool = True,
    limits: Limits | None = None,
    root: Path = ROOT,
) -> Report:
    """Run tests, each failure in a process of pytest that ends with it.

    Args:
        arguments: of pytest.
        only: the ids of the tests to run; None: all that ``arguments`` select.
        share: of these tests; None: all.
        ends_at_failure: whether the tests after a failed one run in a new process.
        limits: on time and failures.
        root: the folder that pytest runs in, and that ids are relative to.
    """
    limits = limits or Limits()
    report = Report()
    options = ["-x"] if ends_at_failure else []
    if share is not None:
        options += [f"--claims={share.claims}", f"--claimant={share.name}"]
    files: list[str] = []
    if only is not None:
        only = list(only)
        files = list(dict.fromkeys(test.partition("::")[0] for test in only))
    while True:
        attempt = _Attempt([*options, *arguments, *files], only, list(report.outcomes), root)
        try:
            is_done = attempt.run(report, limits)
        finally:
            attempt.close()
        if _is_stopping.is_set():
            report.error = report.error or "the tests were stopped"
        if is_done or report.error:
            return report
        if len(report.failed) > limits.failures:
            report.error = f"more than {limits.failures} tests failed: the rest was not run"
            return report


class _Attempt:
    """One process of pytest, and the folder of all that it and its children write.

    Args:
        arguments: of pytest.
        only: the ids of the tests to run; None: all.
        without: the ids of those that have run.
        root: the folder to run in.
    """

    def __init__(
        self, arguments: list[str], only: list[str] | None, without: list[str], root: Path
    ) -> None:
        # short, as Ray's sockets lie in it
        self._folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))
        (self._folder / "stacks").mkdir()
        self._events = self._folder / "events"
        self._events.touch()
        command = [sys.executable, "-m", "pytest", "-p", "tests.gating.recorder"]
        # with "=", as pytest looks for its settings beside arguments that are paths
        command += [f"--events={self._events}"]
        for option, ids in (("--only", only), ("--without", without)):
            if ids is not None:
                path = self._folder / option.strip("-")
                path.write_text(json.dumps(ids))
                command += [f"{option}={path}"]
        self._started = time.time()
        self._why = ""
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *arguments],
                cwd=root,
                env={**os.environ, FOLDER: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, report: Report, limits: Limits) -> bool:
        """Add outcomes to the report until pytest ends; return whether all tests have run."""
        position, running, complete = 0, "", False
        last = said = time.monotonic()
        while True:
            ended = self._process.poll() is not None
            lines = self._read_lines(position)
            for line in lines:
                position += len(line)
                event, *rest = json.loads(line)
                last = time.monotonic()
                if event == "begin":
                    (running,) = rest
                elif event == "end":
                    test, report.outcomes[test], report.seconds[test] = rest
                    running = ""
                    if report.outcomes[test] == "failed":
                        _say(f"{test} has failed")
                else:
                    complete = True
            if ended:
                break
            if _is_stopping.is_set():
                break
            if time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                _say(f"{len(report.outcomes)} tests have ended; {running or 'none'} runs")
            passed = time.monotonic() - last
            if not lines and (why := _too_long(limits, passed, running, position > 0, complete)):
                self._why = f"{why}\n{describe(self._folder, self._started)}\n"
                break
            time.sleep(0.1)
        status = self._process.poll()
        if running:
            report.outcomes[running] = "failed"
            self._why += f"{running} did not end; pytest's status is {status}\n"
        elif status not in (None, 0, 1, 5) and not complete:
            report.error = f"pytest ended with status {status}"
        elif position == 0 and status != 5:
            report.error = "no test has begun"
        return complete or status == 5  # 5: none is left

    def _read_lines(self, position: int) -> list[str]:
        """Return the whole lines of the events after a position."""
        with self._events.open() as file:
            file.seek(position)
            return [line for line in file.readlines() if line.endswith("\n")]

    def close(self) -> None:
        """End what is left of pytest's processes, print what they printed, remove their files."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        left = [each for each in end_processes(self._folder) if "-m pytest" not in each]
        self._process.wait(30)
        with _printing:
            print((self._folder / "output").read_text(errors="replace"), self._why, sep="\n")
            if left:
                print("ended processes that were left:", *(f"  {c[:150]}" for c in left), sep="\n")
            sys.stdout.flush()
        shutil.rmtree(self._folder, ignore_errors=True)


def _say(text: str) -> None:
    """Print how it goes, as what pytest prints comes late."""
    with _printing:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _too_long(
    limits: Limits, passed: float, running: str, has_begun: bool, is_complete: bool
) -> str:
    """Return why pytest is to be ended; "" as long as it may go on.

    Args:
        limits: in seconds.
        passed: seconds since the last event.
        running: the id of the test that runs; "" if none does.
        has_begun: whether one has.
        is_complete: whether all have.
    """
    if is_complete:
        return "pytest does not end" if passed > limits.end else ""
    if not has_begun:
        return "no test begins" if passed > limits.collect else ""
    if passed > limits.test:
        return f"{running or 'the end of pytest'} takes more than {limits.test:g} s"
    return ""
