"""The actor that is a worker; here without Ray: how it reports the end of a rank's main."""

import pickle
import sys
from typing import Any

import pytest

from rayrpc import config
from rayrpc.launch.hosted import Ended, HostedWorker, Target

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
    made._program, made._capture, made._label = Loads(), None, "w"
    made._cluster = "10.0.0.1:6379"
    monkeypatch.setattr(config, "_current", config.Settings(address="local"))  # and restores it
    return made


def test_the_shim_is_entered_before_the_program_is_loaded(worker):
    target = Target(pickle.dumps((well, ("a", 2))))
    assert worker.run(3, target, pickle.dumps(enter_shim), None) == Ended()
    assert events == ["shim", "load", (3, "a", 2)]
    assert config.settings().address == "10.0.0.1:6379"  # what it starts joins the same cluster


def test_without_a_shim_the_program_is_only_loaded(worker):
    assert worker.run(0, Target(pickle.dumps((well, ()))), None, None) == Ended()
    assert events == ["load", (0,)]


@pytest.mark.parametrize(
    ("code", "ended"),
    [(None, Ended()), (0, Ended()), (5, Ended(5)), ("a message", Ended(1, "a message"))],
)
def test_an_exit_of_the_main_is_its_end(worker, code, ended):
    assert worker.run(0, Target(pickle.dumps((exits, (code,)))), None, None) == ended


@pytest.mark.parametrize(
    ("main", "text"), [(fails, "ValueError: as expected"), (interrupted, "KeyboardInterrupt")]
)
def test_an_exception_of_the_main_is_reported_with_its_traceback(worker, main, text):
    ended = worker.run(0, Target(pickle.dumps((main, ()))), None, None)
    assert ended.exit_code == 1
    assert text in ended.trace and f"in {main.__name__}" in ended.trace


def test_a_target_that_cannot_be_unpickled_is_reported(worker):
    ended = worker.run(0, Target(b"no pickle"), None, None)
    assert ended.exit_code == 1 and "UnpicklingError" in ended.trace


def test_a_worker_without_a_collector_runs_all_the_same(worker, tmp_path, caplog):
    missing = str(tmp_path / "missing")
    assert worker.run(0, Target(pickle.dumps((well, ()))), None, missing) == Ended()
    assert "cannot reach the collector of output" in caplog.text
