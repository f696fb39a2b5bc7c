"""What workers report of their calls and threads; a status never shows what is not there."""

import contextlib
import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import eventually
from memory_workers import memory_group
from torch.futures import Future

from rayrpc import observe
from rayrpc._observe.group_status import GroupStatus
from rayrpc._observe.report import Inspector, function_name
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import CallTimeoutError
from rayrpc.functions import async_execution
from rayrpc.futures import extend_futures, wait_all

kept = {}


@pytest.fixture
def group():
    """Start workers that can be inspected; what they still run ends with the test."""
    kept.clear()
    kept["go"] = threading.Event()
    kept["workers"] = {}
    extend_futures()
    with memory_group() as start:

        def begin(*names, **options):
            workers = [start(name, **options) for name in names]
            for worker in workers:
                worker.agent.callee.inspect = Inspector(worker.agent, False).answer
                kept["workers"][worker.name] = worker
            return workers

        yield begin
        kept["go"].set()
        for thread in kept.get("threads", ()):
            thread.join(60)


def spawn(function, *args):
    thread = threading.Thread(target=function, args=args, name="a user's")
    thread.start()
    kept.setdefault("threads", []).append(thread)


def blocks(*_):
    kept["go"].wait(60)


@async_execution
def answers_later():
    future = Future()
    kept["later"] = future
    return future


async def awaits():
    import asyncio

    while not kept["go"].is_set():
        await asyncio.sleep(0.02)


def calls_on(name, function, *args):
    """Call another worker from inside a call."""
    worker = kept["workers"][name[0]]
    return worker.sync(kept["workers"][name[1]], function, *args)


def status(worker):
    reports = [json.loads(data) for _, data in worker.agent.inspection.request(b"stacks", 30)]
    return GroupStatus("key", "", reports)


def states(worker):
    return sorted(
        (call["function"].rpartition(".")[2], call["state"]) for call in status(worker).calls
    )


def test_calls_are_reported_in_each_state(group):
    a, b = group("a", "b", num_worker_threads=1)
    spawn(a.sync, b, blocks)
    assert eventually(lambda: b.agent.callee.active == 1)
    assert eventually(lambda: states(a) == [("blocks", "running")])
    a.future(b, blocks)
    assert eventually(lambda: states(a) == [("blocks", "queued"), ("blocks", "running")])
    found = status(a)
    worker = found.workers[1]
    assert worker["slots"] == {"limit": 1, "busy": 1, "queued": 1}
    assert worker["name"] == "b" and worker["memory"] > 1e6 and not worker["hosted"]
    assert found.workers[0]["sent"] == 2 and worker["served"] == 2
    assert all(0 <= call["seconds"] < 60 for call in found.calls)
    kept["go"].set()
    assert eventually(lambda: states(a) == [])
    assert status(a).workers[1]["serving"] == []


@pytest.mark.parametrize("function", [answers_later, awaits])
def test_a_call_whose_value_comes_later_waits(group, function):
    a, b = group("a", "b")
    future = a.future(b, function)
    assert eventually(lambda: states(a) == [(function.__name__, "waiting")])
    assert status(a).workers[1]["slots"]["busy"] == 0
    if function is answers_later:
        kept["later"].set_result(1)
    kept["go"].set()
    future.wait()
    assert states(a) == []


def waits_by_sync(a, b):
    a.sync(b, blocks)


def waits_by_future(a, b):
    a.future(b, blocks).wait()


def waits_by_wait_all(a, b):
    wait_all([a.future(b, len, "ab"), a.future(b, blocks)])


def waits_for_an_rref(a, b):
    a.remote(b, blocks).to_here()


def waits_for_its_own_rref(a, b):
    a.remote(a, blocks).to_here()


@pytest.mark.parametrize(
    "wait",
    [
        waits_by_sync,
        waits_by_future,
        waits_by_wait_all,
        waits_for_an_rref,
        waits_for_its_own_rref,
    ],
)
def test_what_a_thread_waits_for_is_found(group, wait):
    a, b = group("a", "b")
    to = "a" if wait is waits_for_its_own_rref else "b"
    spawn(wait, a, b)

    def chain():
        return next(iter(status(a)._waits.chains()), None)

    assert eventually(lambda: (c := chain()) and c[-1].stack and c[0].to == to), chain()
    found = chain()
    assert found[0].worker == "a" and found[0].thread == "a user's"
    assert any(frame["function"] == "blocks" for frame in found[-1].stack)
    assert not any("_runtime" in frame["file"] for frame in found[-1].stack)
    text = status(a).stacks()
    assert f"a waits for {to} (" in text and " is at " in text and "in blocks" in text
    assert wait.__name__ in text  # the stack of the thread that waits, too
    kept["go"].set()
    assert eventually(lambda: chain() is None)


def test_a_wait_for_a_worker_without_a_call_is_told(group):
    a, _ = group("a", "b")

    def waits_in_shutdown():
        with a.agent.waits.noted("shutdown", lambda: ["b"]):
            kept["go"].wait(60)

    spawn(waits_in_shutdown)
    assert eventually(a.agent.waits.now)
    found = status(a)
    (thread,) = (each for each in found.workers[0]["threads"] if each["name"] == "a user's")
    assert thread["waits_in"]["for"] == ["b"] and 0 <= thread["waits_in"]["seconds"] < 60
    text = "a waits in shutdown for b ("
    assert text in found.text() and text in found._repr_html_() and text in found.stacks()
    assert "  waits in shutdown for b\n" in found.stacks()
    (words,) = Inspector(a.agent, False).waits_in_words().values()
    assert words[0].startswith("b, in shutdown (")
    kept["go"].set()
    assert eventually(lambda: not a.agent.waits.now())
    assert "waits in" not in status(a).text()


def test_the_main_of_a_hosted_rank_is_known_by_its_name(group):
    """It runs in another thread than the process's main one."""
    a, _ = group("a", "b")

    def main_of_a_rank():
        threading.current_thread().name = "MainThread"
        with a.agent.waits.noted("shutdown", lambda: ["b"]):
            kept["go"].wait(60)

    spawn(main_of_a_rank)
    assert eventually(a.agent.waits.now)
    mains = [each for each in status(a).workers[0]["threads"] if each["is_main"]]
    assert [each["waits_in"]["for"] for each in mains] == [["b"]]
    assert any(frame["function"] == "main_of_a_rank" for frame in mains[0]["stack"])


def test_workers_whose_slots_wait_for_one_another_are_a_deadlock(group):
    a, b = group("a", "b", num_worker_threads=1)
    both = threading.Barrier(2)
    kept["both"] = both

    def begin(one, other):
        with contextlib.suppress(CallTimeoutError):
            one.sync(other, meets, (other.name, one.name))

    spawn(begin, a, b)
    spawn(begin, b, a)
    assert eventually(lambda: status(a).deadlocks == [["a", "b"]])
    assert "deadlock: a -> b -> a" in status(a).text()
    assert "deadlock: a -> b -> a" in status(b).stacks()
    kept["go"].set()


def meets(way):
    kept["both"].wait(60)
    one, other = (kept["workers"][name] for name in way)
    call = one.agent.caller.start(one.find(other), Invocation(blocks), 60)
    call(unwanted=kept["go"].is_set)


def test_a_busy_group_has_no_deadlock_and_its_reports_no_error(group, quick_switches):
    a, b = group("a", "b", num_worker_threads=2)

    def busy(one, other):
        for _ in range(150):
            assert one.sync(other, bounces, (other.name, one.name), 2) == 2

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(busy, a, b), pool.submit(busy, b, a)]
        count = 0
        while not all(run.done() for run in runs):
            found = status(a)
            assert found.deadlocks == [], found.stacks()
            assert found.stacks() and found.text()
            count += 1
        for run in runs:
            run.result()
    assert count > 5
    assert states(a) == []


def bounces(way, depth):
    one, other = (kept["workers"][name] for name in way)
    # a slot of the other's stays free: two callers, each of which takes one there at a time
    return 1 + one.sync(other, int, 1) if depth else 0


def test_rrefs_are_counted_where_they_are_owned_and_held(group):
    a, b = group("a", "b")
    handles = [a.remote(b, len, "abc") for _ in range(3)]
    assert eventually(lambda: states(a) == [])
    counts = [worker["rrefs"] for worker in status(a).workers]
    assert counts == [{"owned": 0, "held": 3}, {"owned": 3, "held": 0}]
    del handles
    assert eventually(lambda: status(a).workers[1]["rrefs"]["owned"] == 0)


def test_a_worker_that_does_not_answer_in_time_is_told_apart(group):
    a, b = group("a", "b")

    def hangs(what):
        kept["go"].wait(60)
        return b""

    b.agent.callee.inspect = hangs
    spawn(kept["go"].wait, 0.5)
    (_, own), (_, other) = a.agent.inspection.request(b"", 0.5)
    assert json.loads(own)["name"] == "a" and isinstance(other, TimeoutError)


def test_a_process_in_no_group_is_told():
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        observe.status()


class Model:
    def forward(self):
        """Do nothing."""


def test_functions_are_named_as_users_write_them():
    assert function_name(Model().forward) == f"{__name__}.Model.forward"
    assert function_name(functools.partial(json.dumps, 1)) == "json.dumps"
    assert function_name(len) == "len" and function_name("run_episode") == "run_episode"
    assert function_name(None) == "" and function_name(torch.mm) == "torch.mm"
    assert function_name(Model) == f"{__name__}.Model"
