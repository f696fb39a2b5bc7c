"""The actor that is a worker; here without Ray: how it reports the end of a rank's main."""

import pickle
import sys
import threading
from typing import Any

import pytest

from rayrpc.launch.hosted import Ended, HostedWorker

events = []


class Loads:
    """Stands for a Program."""

    def load(self):
        events.append("load")


def enter_shim():
    events.append("shim")


def well(rank, *args):
    events.append((rank, *args))


def exits(rank, code):
    sys.exit(code)


def fails(rank):
    raise ValueError("as expected")


def interrupted(rank):
    raise KeyboardInterrupt


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "events", [])
    made: Any = HostedWorker.__new__(HostedWorker)  # its __init__ needs an actor
    made._program, made._captures, made._capture = Loads(), False, None
    made._capture_decided = threading.Event()
    return made


def test_the_shim_is_entered_before_the_program_is_loaded(worker):
    target = pickle.dumps((well, ("a", 2)))
    assert worker.run(3, target, pickle.dumps(enter_shim)) == Ended()
    assert events == ["shim", "load", (3, "a", 2)]


def test_without_a_shim_the_program_is_only_loaded(worker):
    assert worker.run(0, pickle.dumps((well, ())), None) == Ended()
    assert events == ["load", (0,)]


@pytest.mark.parametrize(
    ("code", "ended"),
    [(None, Ended()), (0, Ended()), (5, Ended(5)), ("a message", Ended(1, "a message"))],
)
def test_an_exit_of_the_main_is_its_end(worker, code, ended):
    assert worker.run(0, pickle.dumps((exits, (code,))), None) == ended


@pytest.mark.parametrize(
    ("main", "text"), [(fails, "ValueError: as expected"), (interrupted, "KeyboardInterrupt")]
)
def test_an_exception_of_the_main_is_reported_with_its_traceback(worker, main, text):
    ended = worker.run(0, pickle.dumps((main, ())), None)
    assert ended.exit_code == 1
    assert text in ended.trace and f"in {main.__name__}" in ended.trace


def test_a_target_that_cannot_be_unpickled_is_reported(worker):
    ended = worker.run(0, b"no pickle", None)
    assert ended.exit_code == 1 and "UnpicklingError" in ended.trace


def test_a_worker_that_does_not_capture_its_output_reports_the_end_at_once(worker):
    worker.run(0, pickle.dumps((well, ())), None)
    assert worker.read_output() is None
