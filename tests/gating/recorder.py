"""A plugin of pytest that writes what happens to which test, while it happens.

Each line of the file is a JSON list: ``["begin", ID]``, ``["end", ID, OUTCOME, SECONDS]`` with
"passed", "failed" or "skipped", and at last ``["complete"]`` if no test was left out.

Several processes of pytest may share the tests: each claims a file of tests before it runs the
first of them, and leaves out those that another one has claimed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Claims", "Recorder"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate")
    group.addoption("--events", type=Path, help="write what happens to each test to this file")
    group.addoption("--only", type=Path, help="run the tests with the ids in this file")
    group.addoption("--without", type=Path, help="leave out the tests with the ids in this file")
    group.addoption("--claims", type=Path, help="the folder of claims to files of tests")
    group.addoption("--claimant", default="", help="the name to claim by")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--events")
    if path is not None:
        config.pluginmanager.register(Recorder(path))
    folder: Path | None = config.getoption("--claims")
    if folder is not None:
        config.pluginmanager.register(Claims(folder, config.getoption("--claimant")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, without = _ids(config, "--only"), _ids(config, "--without") or set()
    kept = [i for i in items if i.nodeid not in without and (only is None or i.nodeid in only)]
    if only is not None and (missing := only - {item.nodeid for item in items}):
        raise pytest.UsageError(f"there are no tests {sorted(missing)}")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _ids(config: pytest.Config, option: str) -> set[str] | None:
    path: Path | None = config.getoption(option)
    return None if path is None else set(json.loads(path.read_text()))


class Claims:
    """Leave out the files of tests that another process has claimed.

    Args:
        folder: of the claims, one for each file of tests.
        claimant: the name of this process, and of those that take its place after a failure.
    """

    def __init__(self, folder: Path, claimant: str) -> None:
        self._folder = folder
        self._claimant = claimant

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests as pytest does, those of a file after the file has been claimed."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        items = (item for item in session.items if self._take(item.path))
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # known before its teardown, which keeps what both need
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _take(self, path: Path) -> bool:
        """Claim a file of tests; return whether it is this claimant's.

        Tests on hosts, which share these, are claimed together.
        """
        path = path.parent if path.parent.name == "hosts" else path
        claim = self._folder / str(path).replace(os.sep, "+")
        try:
            claim.symlink_to(self._claimant)  # made and written at once
        except FileExistsError:
            return os.readlink(claim) == self._claimant
        return True


class Recorder:
    """Write the events of one session.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False  # the present test, in any of its phases
        self._skipped = False
        self._seconds = 0.0

    def _write(self, *event: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._failed = self._skipped = False
        self._seconds = 0.0
        self._write("begin", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._skipped |= report.skipped
        self._seconds += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = "failed" if self._failed else "skipped" if self._skipped else "passed"
        self._write("end", nodeid, outcome, self._seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        has_run = exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        if has_run and not (session.shouldfail or session.shouldstop):
            self._write("complete")
