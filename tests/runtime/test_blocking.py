"""Whatever may block in a handler releases its connection's reader before."""

import threading
from typing import Any

import pytest
import torch
from memory_workers import MemoryWorker

import rayrpc
from rayrpc._concurrency.reader import on_block
from rayrpc._jit import tasks
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import all_gather
from rayrpc._runtime.all_gather import Calls, gather
from rayrpc._runtime.noted_waits import NotedWaits
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.served_call import ServedCall
from rayrpc._transports.memory import MemoryHub
from rayrpc.futures import wait_all
from rayrpc.jit import Await

WAIT = 60.0


@pytest.fixture
def worker():
    worker = MemoryWorker(MemoryHub(), "a")
    yield worker
    worker.agent.shutdown()


def releases(block, end) -> bool:
    """Tell whether ``block`` releases the reader before it blocks; ``end`` makes it return."""
    released, returned = threading.Event(), threading.Event()

    def run() -> None:
        with on_block(released.set):
            block()
        returned.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    done = released.wait(WAIT) and not returned.is_set()
    end()
    thread.join(WAIT)
    return done and not thread.is_alive()


def complete(future: Any):
    return lambda: future.set_result(None)


def test_a_wait_for_a_change_of_the_group(worker):
    ready: list[int] = []

    def end() -> None:
        ready.append(1)
        worker.agent.members.notify()

    assert releases(lambda: worker.agent.members.wait_until(lambda: ready, WAIT), end)


def test_a_search_for_a_member_that_is_not_known_yet(worker):
    asked, answer = threading.Event(), threading.Event()

    def fetch() -> list[Any]:
        asked.set()
        answer.wait(WAIT)
        return [worker.member]

    worker.agent.members._fetch = fetch

    def block() -> None:
        with pytest.raises(RuntimeError, match="could not find destination"):
            worker.agent.lookup("nobody")

    assert releases(block, answer.set) and asked.is_set()


def test_a_drain_and_a_barrier_of_the_directory(worker):
    calls = worker.agent.callee._calls
    calls[ServedCall(worker.member.id, 1)] = None  # one is under way
    assert releases(lambda: worker.agent.drain(WAIT), calls.clear)
    other = MemoryWorker(worker.transport._hub, "b")
    assert releases(lambda: worker.agent.join(timeout=WAIT), other.agent.join)
    other.agent.shutdown()


def test_a_deletion_of_all_rrefs(worker):
    table = worker.agent.rrefs._table
    settled: list[int] = []
    table.is_settled = lambda: settled
    assert releases(lambda: worker.agent.rrefs.delete_all(WAIT), lambda: settled.append(1))


def test_a_wait_for_futures():
    first: Any = torch.futures.Future()
    assert releases(lambda: wait_all([first]), complete(first))
    second: Any = torch.futures.Future()
    assert releases(lambda: rayrpc.jit.wait(second), complete(second))


def test_a_wait_for_the_type_of_a_remote_value():
    kind: Any = torch.futures.Future()
    rref: Any = RRef.__new__(RRef)
    rref._fork_id, rref._type = None, kind
    assert releases(rref._get_type, complete(kind))


def test_a_wait_for_a_value_that_another_thread_computes():
    begun, end = threading.Event(), threading.Event()

    def compute() -> int:
        begun.set()
        end.wait(WAIT)
        return 1

    value: Any = Await(compute)
    thread = threading.Thread(target=value.wait, daemon=True)
    thread.start()
    assert begun.wait(WAIT)
    assert releases(value.wait, end.set)
    thread.join(WAIT)


def test_a_start_of_the_workers_for_tasks_neither_keeps_the_reader_nor_stops_replies(monkeypatch):
    workers = tasks._Workers()
    started = threading.Event()
    names: list[str] = []
    monkeypatch.setattr(workers, "_members", lambda: names)

    def start(prefix: str) -> None:
        started.wait(WAIT)
        names.append(f"{prefix}0")

    def end() -> None:
        workers._tasks["fork-9"] = 1
        workers.release("fork-9")  # what a reply to another task does
        started.set()

    assert releases(lambda: workers.acquire(start), end)
    assert workers._tasks == {"fork-9": 0, "fork-0": 1}


class Leader:
    """A follower's agent, and the calls that it makes."""

    def __init__(self, leader: str, me: str) -> None:
        self._infos = [WorkerInfo(leader, 0), WorkerInfo(me, 1)]
        self.default_timeout = WAIT
        self.members = self  # it stands for them, too
        self.sent: list[str] = []
        self.waits = NotedWaits()

    def get_worker_info(self) -> WorkerInfo:
        return self._infos[1]

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self._infos

    def wait_until(self, ready: Any, timeout: Any) -> bool:
        return bool(ready())

    def rpc_sync(self, to: str, func: Any, args: Any, timeout: float) -> None:
        self.sent.append(args[0])
        all_gather._all_gather_sequence_id_to_states[args[0]].proceed_signal.set()


def test_a_gathering_of_shutdown_is_not_one_of_the_program(monkeypatch):
    monkeypatch.setattr(all_gather, "_all_gather_sequence_id", {})
    agent: Any = Leader("a", "b")
    calls = Calls(agent.rpc_sync, agent.rpc_sync, lambda *args: None, lambda *args: None)
    names = {"a", "b"}
    for survivors in (True, False, False):  # shutdown waits while calls gather
        gather(agent, calls, None, names, -1, survivors)
    of_shutdown, first, second = agent.sent
    agent.sent.clear()
    monkeypatch.setattr(all_gather, "_all_gather_sequence_id", {})
    for survivors in (False, True, False):  # a worker where they come in another order
        gather(agent, calls, None, names, -1, survivors)
    assert agent.sent == [first, of_shutdown, second] and len({*agent.sent}) == 3


def test_the_gatherings_of_other_names_are_others(monkeypatch):
    monkeypatch.setattr(all_gather, "_all_gather_sequence_id", {})
    agent: Any = Leader("a", "b")
    calls = Calls(agent.rpc_sync, agent.rpc_sync, lambda *args: None, lambda *args: None)
    for _ in range(11):
        gather(agent, calls, None, {"a", "b"}, -1, False)
    other: Any = Leader("a", "b1")
    calls = Calls(other.rpc_sync, agent.rpc_sync, lambda *args: None, lambda *args: None)
    gather(other, calls, None, {"a", "b1"}, -1, False)
    assert other.sent[0] not in agent.sent
