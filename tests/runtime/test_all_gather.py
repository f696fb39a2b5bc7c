"""Gatherings of workers of which some die, each with the state of a process of its own."""

import importlib.util
import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

from rayrpc import api
from rayrpc._concurrency import notices
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import all_gather
from rayrpc._runtime.all_gather import Calls
from rayrpc._runtime.noted_waits import NotedWaits
from rayrpc.errors import WorkerDiedError

WAIT = 60.0
NAMES = {"a", "b", "c"}


class Group:
    """Workers in threads; ``alive`` are the names of those that live."""

    def __init__(self) -> None:
        self.alive = set(NAMES)
        self.changed = threading.Condition()
        self.workers = {name: GatheringWorker(self, name) for name in NAMES}

    def kill(self, name: str) -> None:
        with self.changed:
            self.alive.discard(name)
            self.changed.notify_all()


class GatheringWorker:
    """What a gathering needs of its worker; the calls are made at once."""

    def __init__(self, group: Group, name: str) -> None:
        spec: Any = importlib.util.find_spec("rayrpc._runtime.all_gather")
        self.module: Any = importlib.util.module_from_spec(spec)  # with state of its own
        spec.loader.exec_module(self.module)
        vars(self.module)["current"] = self
        self.group = group
        self.name = name
        self.default_timeout = WAIT
        self.members = self  # it stands for them, too
        self.outcome: Any = None
        self.waits = NotedWaits()

    def get_agent(self) -> Any:
        return self

    def notify(self) -> None:
        with self.group.changed:
            self.group.changed.notify_all()

    def get_worker_info(self) -> WorkerInfo:
        return WorkerInfo(self.name, 0)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo(name, 0) for name in sorted(self.group.alive)]

    def wait_until(self, ready: Any, timeout: Any) -> bool:
        with self.group.changed:
            return bool(self.group.changed.wait_for(ready, WAIT))

    def rpc_sync(self, to: str, func: Any, args: Any, timeout: float) -> Any:
        if to not in self.group.alive:
            raise WorkerDiedError(to, "it was killed", "here")
        module = self.group.workers[to].module
        return getattr(module, func)(
            *args[:3]
        )  # the names of all, as torch sends them, are not used

    def rpc_async(self, to: str, func: Any, args: Any, timeout: float) -> Any:
        self.rpc_sync(to, func, args, timeout)
        return Done()

    def gather(self) -> None:
        broadcast: Any = "receive_all"
        calls = Calls(self.rpc_sync, self.rpc_async, GatherToLeader(self), broadcast)
        self.outcome = self.module.gather(self, calls, self.name, NAMES, -1, survivors=True)


class GatherToLeader(str):
    """The name of a function, which the worker itself can call, too."""

    worker: GatheringWorker

    def __new__(cls, worker: GatheringWorker) -> Any:
        made = super().__new__(cls, "receive_one")
        made.worker = worker
        return made

    def __call__(self, *args: Any) -> Any:
        return self.worker.module.receive_one(*args)


class Done:
    def wait(self) -> None:
        pass


@pytest.fixture
def group():
    return Group()


def start(worker: GatheringWorker) -> threading.Thread:
    thread = threading.Thread(target=worker.gather, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("has_all", ["b", "c"])
def test_a_leader_that_dies_while_it_sends_all_objects_is_succeeded(group, has_all):
    (other,) = {"b", "c"} - {has_all}
    a = group.workers["a"]

    def send_to_one(calls, args, names, rpc_timeout, survivors):
        a.rpc_sync(has_all, "receive_all", args, WAIT)
        group.kill("a")

    a.module._send_to_followers = send_to_one
    threads = {name: start(group.workers[name]) for name in NAMES}
    threads[has_all].join(WAIT)  # it has ended, and forgotten the gathering, or will
    threads[other].join(WAIT)
    assert not any(thread.is_alive() for thread in threads.values())
    for name in ("b", "c"):
        assert group.workers[name].outcome == {"a": "a", "b": "b", "c": "c"}


def test_on_a_terminal_a_line_tells_who_is_waited_for(group, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.1)
    threads = [start(group.workers[name]) for name in "ab"]
    lines = {
        "rayrpc: waiting for c in shutdown",
        "rayrpc: waiting for a, which waits for all, in shutdown",
    }
    assert eventually(lambda: set(terminal.getvalue().splitlines()) == lines)
    for thread in (*threads, start(group.workers["c"])):
        thread.join(WAIT)
        assert not thread.is_alive()


def test_what_an_earlier_group_gathered_is_forgotten(monkeypatch):
    monkeypatch.setitem(all_gather._ended, "shutdown! a", ("shutdown! a 0", {"a": "old"}))
    monkeypatch.setattr(api, "_ALL_WORKER_NAMES", set())
    monkeypatch.setattr(api, "_is_current_rpc_agent_set", lambda: True)
    api._init_rpc_states(SimpleNamespace(get_worker_infos=lambda: [WorkerInfo("a", 0)]))
    assert not all_gather._ended
