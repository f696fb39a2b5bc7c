"""The supervisor of the tests, on small tests of its own: failures, hangs, second chances."""

import os
import subprocess
import sys
from pathlib import Path

import gate
import pytest
from conftest import python_path
from gating.post_mortem import FOLDER, describe, processes_of
from gating.supervisor import ROOT, Limits, Report, Share, run_tests

pytestmark = pytest.mark.process

TESTS = """
import os, pathlib, signal, subprocess, sys, threading, time
import pytest

HERE = pathlib.Path(__file__).parent

def first_time(name):
    path = HERE / name
    is_first = not path.exists()
    path.touch()
    return is_first

@pytest.fixture(scope="module")
def shared():
    return []

"""

PASSES = """
def test_passes(shared):
    shared.append(1)

"""

# A test that fails leaves what would have the next ones fail, too.
FAILS_ONCE = """
def test_fails_once(shared):
    shared.append("left")
    assert not first_time("failed"), "as expected"

def test_later(shared):
    assert "left" not in shared

"""

HANGS = """
def hangs_here():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)

def test_hangs(shared):
    hangs_here()

"""

DIES = """
def test_dies(shared):
    os.kill(os.getpid(), signal.SIGKILL)

"""

LEAVES = """
def test_leaves_a_process(shared):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)
    (HERE / "pid").write_text(str(child.pid))

"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run tests of a file in a folder of their own, with no other plugins of pytest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the supervisor's plugin
    (tmp_path / "pytest.ini").write_text("[pytest]")

    def run_some(*tests, **options):
        (tmp_path / "test_some.py").write_text(TESTS + "".join(tests))
        arguments = ["-q", "-p", "no:cacheprovider"]
        return run_tests(arguments, root=tmp_path, **options)

    return run_some


def outcomes(report):
    return {test.partition("::")[2]: outcome for test, outcome in report.outcomes.items()}


def test_tests_that_pass_run_in_one_process(run):
    report = run(PASSES, "def test_again(shared): assert shared == [1]\n")
    assert outcomes(report) == {"test_passes": "passed", "test_again": "passed"}
    assert report.error == "" and all(seconds >= 0 for seconds in report.seconds.values())


def test_after_a_failure_the_others_run_in_a_new_process(run):
    report = run(FAILS_ONCE, PASSES)
    assert outcomes(report) == {
        "test_fails_once": "failed",
        "test_later": "passed",
        "test_passes": "passed",
    }
    assert report.error == ""


def test_unit_tests_go_on_in_the_same_process(run):
    report = run(FAILS_ONCE, PASSES, ends_at_failure=False)
    assert outcomes(report)["test_later"] == "failed"
    assert outcomes(report)["test_passes"] == "passed"


def test_a_test_that_no_signal_ends_is_ended_and_its_stacks_are_shown(run, capfd):
    report = run(PASSES, HANGS, "def test_last(): pass\n", limits=Limits(test=3.0))
    assert outcomes(report) == {
        "test_passes": "passed",
        "test_hangs": "failed",
        "test_last": "passed",
    }
    printed = capfd.readouterr().out
    assert "takes more than 3 s" in printed and "-- machine: load " in printed


def test_a_test_that_ends_its_process_fails_and_the_others_run(run):
    report = run(DIES, PASSES)
    assert outcomes(report) == {"test_dies": "failed", "test_passes": "passed"}


def test_what_tests_leave_is_ended(run, tmp_path, capfd):
    report = run(LEAVES)
    assert outcomes(report) == {"test_leaves_a_process": "passed"}
    assert "ended processes that were left:" in capfd.readouterr().out
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_after_too_many_failures_the_rest_is_not_run(run):
    tests = [f"def test_{number}(): assert False\n" for number in range(3)]
    report = run(*tests, PASSES, limits=Limits(failures=1))
    assert outcomes(report) == {"test_0": "failed", "test_1": "failed"}
    assert "more than 1 tests failed" in report.error


def test_a_file_that_cannot_be_imported_is_an_error(run):
    report = run("import no_such_module\n", PASSES)
    assert report.outcomes == {} and report.error


def test_tests_may_be_shared_by_files(run, tmp_path):
    claims = tmp_path / "claims"
    claims.mkdir()
    for folder in "abc":
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / f"test_{folder}.py"
        path.write_text("def test_one(): pass\ndef test_two(): pass\n")
    (claims / str(tmp_path / "b" / "test_b.py").replace("/", "+")).symlink_to("another")
    report = run(FAILS_ONCE, share=Share(claims, "me"))
    assert report.outcomes == {
        "a/test_a.py::test_one": "passed",
        "a/test_a.py::test_two": "passed",
        "c/test_c.py::test_one": "passed",
        "c/test_c.py::test_two": "passed",
        "test_some.py::test_fails_once": "failed",
        "test_some.py::test_later": "passed",
    }
    report = run(FAILS_ONCE, share=Share(claims, "another"))
    assert list(report.outcomes) == ["b/test_b.py::test_one", "b/test_b.py::test_two"]
    assert run(FAILS_ONCE, share=Share(claims, "third")).outcomes == {}


def test_tests_on_hosts_are_claimed_together(run, tmp_path):
    claims = tmp_path / "claims"
    claims.mkdir()
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    for name in "ab":
        (hosts / f"test_{name}.py").write_text("def test_one(): pass\n")
    (claims / str(hosts).replace("/", "+")).symlink_to("another")
    assert list(run(PASSES, share=Share(claims, "me")).outcomes) == ["test_some.py::test_passes"]
    report = run(PASSES, share=Share(claims, "another"))
    assert list(report.outcomes) == ["hosts/test_a.py::test_one", "hosts/test_b.py::test_one"]


def test_some_tests_can_be_chosen_by_their_ids(run):
    report = run(PASSES, FAILS_ONCE, only=["test_some.py::test_later"])
    assert outcomes(report) == {"test_later": "passed"} and report.error == ""
    assert run(PASSES, only=["test_some.py::test_other"]).error
    assert run().error == ""  # no tests at all are not an error of theirs


# -- second chances -------------------------------------------------------------------------------


def conclude(run, *tests, units=None, strict=False):
    def run_one(test):
        return run(*tests, only=[test])

    return gate.conclude(units or Report(), run(*tests), None if strict else run_one, 1.0)


def test_a_test_that_fails_once_passes_and_is_named(run, capsys):
    assert conclude(run, FAILS_ONCE) == 0
    *_, flaky, _, last = capsys.readouterr().out.splitlines()
    assert flaky.startswith("flaky: test_some.py::test_fails_once")
    assert last == "2 passed, 0 failed, 0 skipped"


def test_a_test_that_fails_twice_fails(run, capsys):
    assert conclude(run, "def test_fails(): assert False\n", PASSES) == 1
    printed = capsys.readouterr().out
    assert "FAILED test_some.py::test_fails" in printed and "flaky: " not in printed
    assert printed.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_there_are_second_chances_after_the_run_of_all(run, monkeypatch):
    monkeypatch.setattr(gate, "run_tests", lambda *_, **__: Report())
    gate.run_all([], "")
    assert run(PASSES).error == ""


def test_strict_gives_no_second_chance(run, capsys):
    assert conclude(run, FAILS_ONCE, strict=True) == 1
    assert "once more" not in capsys.readouterr().out


def test_a_unit_test_that_fails_gets_none(run, capsys):
    units = Report({"test_unit.py::test_fails": "failed"})
    assert conclude(run, FAILS_ONCE, units=units) == 1
    assert "once more" not in capsys.readouterr().out


def test_more_than_five_failures_get_none(capsys):
    def run_one(test):
        raise AssertionError("as expected not called")

    failed = Report({f"test_{number}": "failed" for number in range(6)})
    assert gate.conclude(Report(), failed, run_one, 1.0) == 1
    assert "ERROR more than 5 tests failed" in capsys.readouterr().out


# -- what a failure shows -------------------------------------------------------------------------


def test_processes_of_a_run_are_known_by_their_folder(tmp_path):
    child = subprocess.Popen(
        ["sh", "-c", "echo on; read end"],
        env={**os.environ, FOLDER: str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        # Popen returns when the child has begun to exec, before its environment can be read.
        assert child.stdout is not None and child.stdout.readline() == b"on\n"
        assert processes_of(tmp_path) == [child.pid]
    finally:
        child.kill()
        child.communicate()


CHILD = """
import threading, time

def sleeps_in_the_child():
    print("on", flush=True)
    time.sleep(60)

threading.Thread(target=sleeps_in_the_child, daemon=True).start()
time.sleep(60)
"""


def test_stacks_of_all_threads_and_the_ends_of_logs_are_shown(tmp_path):
    (tmp_path / "stacks").mkdir()
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    (logs / "old.log").write_text("long ago")
    os.utime(logs / "old.log", (1, 1))
    (logs / "raylet.err").write_text("\n".join(f"line {number}" for number in range(100)))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, FOLDER: str(tmp_path), "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "on\n"
        shown = describe(tmp_path, since=100.0)
    finally:
        child.kill()
        child.communicate()
    assert f"-- stacks of {child.pid} " in shown and "in sleeps_in_the_child" in shown
    assert "-- raylet.err:" in shown and "line 99" in shown and "line 1\n" not in shown
    assert "long ago" not in shown and "-- machine: load " in shown
