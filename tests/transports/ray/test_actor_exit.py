"""The watch for the end of the actor in whose process a worker runs; Ray is a stand-in's."""

import threading
import types
from typing import Any

import pytest
import ray
from conftest import eventually
from ray._private import worker

from rayrpc._transports.ray import actor_exit
from rayrpc._transports.ray.actor_exit import ActorExit

WAIT_SECONDS = 60.0


class Process:
    """What Ray knows of this process: that of an actor."""

    def __init__(self):
        self.mode = ray.WORKER_MODE
        self.actor_id = types.SimpleNamespace(is_nil=lambda: False, hex=lambda: "actor-1")
        self.exits = False
        self.core_worker: Any = types.SimpleNamespace(
            get_current_actor_should_exit=lambda: self.exits
        )
        self.state = "ALIVE"
        self.asked = []

    def actors(self, actor):
        self.asked.append(actor)
        if isinstance(self.state, Exception):
            raise self.state
        return {"State": self.state}


@pytest.fixture
def process(monkeypatch):
    process = Process()
    monkeypatch.setattr(worker, "global_worker", process)
    monkeypatch.setattr(actor_exit, "state", process)
    monkeypatch.setattr(actor_exit, "through_client", lambda: False)
    monkeypatch.setattr(actor_exit, "hosted_endpoint", lambda: None)
    monkeypatch.setattr(actor_exit, "HAS_EXIT_FLAG", True)
    monkeypatch.setattr(actor_exit, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(actor_exit, "ASK_SECONDS", 0.0)
    return process


@pytest.fixture
def watch(process):
    """Watch, and count the calls."""
    watches = []

    def watch():
        exits = []
        one = ActorExit(lambda: exits.append(threading.current_thread().name))
        watches.append(one)
        return one, exits

    yield watch
    for each in watches:
        each.close()


def is_watched():
    return any(thread.name == "rayrpc-exit" for thread in threading.enumerate())


def test_an_actor_that_calls_exit_actor_is_noticed_once(process, watch):
    _, exits = watch()
    assert is_watched()
    process.exits = True
    assert eventually(lambda: exits)
    assert eventually(lambda: not is_watched()) and exits == ["rayrpc-exit"]


def test_one_that_was_let_go_is_noticed_by_asking(process, watch):
    _, exits = watch()
    assert eventually(lambda: len(process.asked) > 2)
    assert not exits and set(process.asked) == {"actor-1"}
    process.state = "DEAD"
    assert eventually(lambda: len(exits) == 1)


def test_ray_is_asked_no_more_often_than_it_should_be(process, watch, monkeypatch):
    monkeypatch.setattr(actor_exit, "ASK_SECONDS", 1000.0)
    polls = []
    process.core_worker.get_current_actor_should_exit = lambda: polls.append(1) is not None
    watch()
    assert eventually(lambda: len(polls) > 5) and not process.asked


def test_a_ray_without_the_flag_is_asked_only(process, watch, monkeypatch):
    monkeypatch.setattr(actor_exit, "HAS_EXIT_FLAG", False)
    process.core_worker = types.SimpleNamespace()
    _, exits = watch()
    process.state = "DEAD"
    assert eventually(lambda: exits)


def test_a_control_service_that_does_not_answer_is_no_end(process, watch):
    process.state = ConnectionError("it has ended")
    _, exits = watch()
    assert eventually(lambda: len(process.asked) > 3)
    assert not exits and is_watched()


def test_the_watch_ends_with_ray(process, watch):
    process.exits = True
    process.core_worker = None
    _, exits = watch()
    assert eventually(lambda: not is_watched()) and not exits


def test_the_watch_may_be_closed_in_its_own_callback_and_again(process):
    closed = threading.Event()
    watches: list[ActorExit] = []

    def close():
        assert eventually(lambda: watches)
        watches[0].close()
        closed.set()

    process.exits = True
    watches.append(ActorExit(close))
    assert closed.wait(WAIT_SECONDS)
    watches[0].close()
    assert not is_watched()


def test_a_closed_watch_calls_nothing(process, watch):
    one, exits = watch()
    one.close()
    process.exits = True
    assert not is_watched() and not exits


@pytest.mark.parametrize("kind", ["hosted worker", "driver", "task", "through Ray Client"])
def test_what_is_no_actor_of_a_program_is_not_watched(process, watch, monkeypatch, kind):
    if kind == "hosted worker":
        monkeypatch.setattr(actor_exit, "hosted_endpoint", object)
    elif kind == "driver":
        process.mode = ray.SCRIPT_MODE
    elif kind == "task":
        process.actor_id.is_nil = lambda: True
    else:
        monkeypatch.setattr(actor_exit, "through_client", lambda: True)
    one, _ = watch()
    assert not is_watched()
    one.close()
