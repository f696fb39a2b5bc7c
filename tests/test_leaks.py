"""The leak check finds what is left, and nothing else; markers say what a test starts."""

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from conftest import ROOT
from leaks import left_over, snapshot


def found_after(leave, clean_up):
    before = snapshot()
    left = leave()
    try:
        return left_over(before, 0.0)
    finally:
        clean_up(left)


def test_a_snapshot_is_equal_to_itself_and_cheap():
    before = snapshot()
    assert left_over(before) == []
    start = time.process_time()
    for _ in range(20):
        left_over(snapshot())
    assert (time.process_time() - start) / 20 < 0.05  # seconds of CPU; it takes under 1 ms


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_is_found(daemon):
    gate = threading.Event()

    def leave():
        thread = threading.Thread(target=gate.wait, name="left", daemon=daemon)
        thread.start()
        return thread

    def clean_up(thread):
        gate.set()
        thread.join()

    expected = "thread left, at " if daemon else "thread left, not a daemon, at "
    (found,) = found_after(leave, clean_up)
    assert found.startswith(expected) and "threading.py:" in found


def test_a_descriptor_is_found(tmp_path):
    (descriptor,) = found_after(lambda: (tmp_path / "file").open("w"), lambda file: file.close())
    assert str(tmp_path / "file") in descriptor


def test_memory_without_a_name_is_found():
    (memory,) = found_after(lambda: os.memfd_create("left"), os.close)
    assert "memfd:left" in memory


def test_shared_memory_is_found():
    path = f"/dev/shm/torch_{os.getpid()}_left"
    assert found_after(lambda: open(path, "x").close(), lambda _: os.unlink(path)) == [
        f"shared memory torch_{os.getpid()}_left"
    ]


def test_a_process_is_found():
    code = "import time; print(flush=True); time.sleep(60)"

    def leave():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()  # Popen returns before the kernel knows the command line
        return process

    def clean_up(process):
        process.kill()
        process.wait()

    found = found_after(leave, clean_up)
    assert any(code in each for each in found), found


def test_an_actor_is_found(ray_cluster):
    import ray

    def leave():
        class Left:  # by value: the actors do not have this file's folder
            pass

        actor: Any = ray.remote(Left).remote()
        ray.get(actor.__ray_ready__.remote(), timeout=60)
        return actor

    before = snapshot()
    actor = leave()
    assert any("Left" in each for each in left_over(before, 0.0))
    ray.kill(actor)
    assert left_over(before) == []


def test_what_ends_soon_is_waited_for():
    before = snapshot()
    threading.Timer(0.05, lambda: None).start()
    assert left_over(before) == []


# -- markers ------------------------------------------------------------------------------------

TESTS = """
import subprocess, sys
import pytest

def start():
    return subprocess.run([sys.executable, "-c", ""])

def test_starts(): start()

@pytest.mark.unit
def test_claims_too_much(): start()

def test_cluster(ray_cluster): pass

def test_nothing(): pass
"""


def run_pytest(folder, *arguments):
    (folder / "test_these.py").write_text(TESTS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, "test_these.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("marker", "names"),
    [
        ("unit", {"test_claims_too_much", "test_nothing"}),
        ("process", {"test_starts"}),
        ("ray", {"test_cluster"}),
    ],
)
def test_markers_follow_from_what_a_test_uses(tmp_path, marker, names):
    output = run_pytest(tmp_path, "--collect-only", "-m", marker)
    found = {line.split("::")[1] for line in output.splitlines() if "::" in line}
    assert found == names, output


def test_a_unit_test_that_starts_a_process_fails(tmp_path):
    output = run_pytest(tmp_path, "-m", "not ray")
    assert "3 passed" in output and "1 error" in output, output
    assert "a unit test started subprocess.Popen" in output
