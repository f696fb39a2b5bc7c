"""A trace of a group: its slices, its arrows, its clocks; and what it must not change."""

import json
import os
import signal
import threading
from collections import Counter

import pytest
import torch
from conftest import eventually
from launching import thread_states
from memory_workers import memory_group
from torch.futures import Future

import rayrpc as rpc
from rayrpc import observe
from rayrpc._concurrency.clocks import Clock
from rayrpc._observe import trace
from rayrpc._observe.trace import TraceHook
from rayrpc._observe.trace_file import Made, Part, Served, Trace
from rayrpc._runtime import current
from rayrpc.errors import CallTimeoutError
from rayrpc.functions import async_execution

SIZE = 4000


@pytest.fixture
def pair():
    """Two workers that record, and how to get their trace."""
    with memory_group() as start:
        workers = [start(name, num_worker_threads=2) for name in "ab"]
        hooks = [TraceHook(worker.member) for worker in workers]
        for worker, hook in zip(workers, hooks, strict=True):
            worker.agent.hooks.append(hook)

        def made():
            return Trace((hook.part, Clock()) for hook in hooks)

        yield *workers, made


def add(x, y=1):
    return x + y


def fails(x):
    raise ValueError("no")


async def adds_later(x):
    import asyncio

    await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    return x + 1


@async_execution
def adds_in_a_future(x):
    future = Future()
    threading.Timer(0.01, future.set_result, (x + 1,)).start()
    return future


kept = {}


def calls_back(x):
    return kept["b"].sync(kept["a"], add, x)


def check(made):
    """Return the events of a trace, once they are found to be well-formed."""
    events = json.loads(json.dumps(made.to_dict()))["traceEvents"]
    by_thread: dict[tuple[int, int], list] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
            assert event["dur"] >= 0
    for slices in by_thread.values():  # those of a thread are one in another, or apart
        slices.sort(key=lambda each: (each["ts"], -each["dur"]))
        open_ends: list[float] = []
        for each in slices:
            end = each["ts"] + each["dur"]
            while open_ends and open_ends[-1] <= each["ts"] + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1.5, (each, slices)
            open_ends.append(end)
    arrows = [event for event in events if event["ph"] in "sf"]
    for arrow in arrows:  # each end is in a slice of its thread
        assert any(
            each["ts"] - 1e-3 <= arrow["ts"] <= each["ts"] + each["dur"] + 1e-3
            for each in by_thread[arrow["pid"], arrow["tid"]]
        ), arrow
    ends = Counter((arrow["id"], arrow["ph"]) for arrow in arrows)
    assert set(ends.values()) <= {1}
    for key, phase in ends:
        assert (key, "f" if phase == "s" else "s") in ends
    times = {(arrow["id"], arrow["ph"]): arrow["ts"] for arrow in arrows}
    for (key, phase), when in times.items():
        if phase == "s":
            assert when <= times[key, "f"] + 1.0, key  # an arrow goes forward
    beside = Counter((e["id"], e["ph"]) for e in events if e["ph"] in "be")
    assert all(beside[key, "b"] == beside[key, "e"] == 1 for key, _ in beside)
    return events


def slices(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"].endswith(name)]


def test_a_call_is_a_slice_at_both_ends_with_arrows_to_and_fro(pair):
    a, b, made = pair
    assert a.sync(b, add, torch.ones(SIZE), 1).sum() == 2 * SIZE
    events = check(made())
    (call,) = slices(events, "test_trace.add -> b")
    (run,) = (each for each in slices(events, "test_trace.add") if each["pid"] == 1)
    assert call["pid"] == 0 and call["args"]["state"] == "ok"
    assert call["args"]["bytes"] > 4 * SIZE
    assert call["ts"] <= run["ts"] and run["ts"] + run["dur"] <= call["ts"] + call["dur"]
    assert len(slices(events, "encode")) == 2 and len(slices(events, "decode")) == 1
    assert [(e["ph"], e["name"], e["pid"]) for e in events if e["ph"] in "sf"] == [
        ("s", "call", 0),
        ("f", "call", 1),
        ("s", "reply", 1),
        ("f", "reply", 0),
    ]
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"a", "b", "MainThread"} <= names
    assert repr(made()) == "<trace of 1 calls of a, b>"


@pytest.mark.parametrize(
    ("function", "runs"), [(add, 1), (adds_later, 4), (adds_in_a_future, 1)], ids=lambda f: str(f)
)
def test_calls_that_nobody_waits_for_in_their_thread_are_beside_it(pair, function, runs):
    a, b, made = pair
    futures = [a.future(b, function, torch.ones(2)) for _ in range(3)]
    assert [future.wait().tolist() for future in futures] == [[2, 2]] * 3
    events = check(made())
    name = f"test_trace.{function.__name__}"
    beside = [e for e in events if e["ph"] in "be" and e["cat"] == "calls"]
    assert len(beside) == 6 and {e["name"] for e in beside} == {f"{name} -> b"}
    assert len(slices(events, f"reply: {name}")) == 3
    assert len([e for e in slices(events, name) if e["pid"] == 1]) == 3 * runs


def test_an_error_ends_where_the_function_did(pair):
    a, b, made = pair
    with pytest.raises(ValueError, match="no"):
        a.sync(b, fails, 1)
    events = check(made())
    (call,) = slices(events, "test_trace.fails -> b")
    assert call["args"]["state"] == "error" and call["dur"] > 0
    assert sum(e["ph"] in "sf" for e in events) == 2


def test_calls_that_wait_for_a_slot_are_shown_as_queued(pair):
    a, b, made = pair
    go = kept["go"] = threading.Event()
    futures = [a.future(b, waits) for _ in range(5)]
    assert eventually(lambda: b.agent.slots.waiting == 3)
    go.set()
    for future in futures:
        future.wait()
    events = check(made())
    queued = [e for e in events if e["ph"] == "b" and e["cat"] == "queue"]
    assert len(queued) == 5 and {e["name"] for e in queued} == {"queued: test_trace.waits"}


def waits():
    kept["go"].wait(60)


def test_nested_calls_rrefs_and_methods_are_in_it(pair):
    a, b, made = pair
    kept.update(a=a, b=b)
    rref = a.remote(b, calls_back, torch.ones(2))
    assert rref.to_here().tolist() == [2, 2]
    assert eventually(lambda: all(each.ended for part in made().parts for each in part.made))
    events = check(made())
    assert len(slices(events, "RRef.to_here -> b")) == 1
    assert len(slices(events, "test_trace.add -> a")) == 1
    assert len(slices(events, "test_trace.calls_back -> b")) == 1


def test_many_threads_make_one_trace(pair, quick_switches):
    a, b, made = pair

    def run(one, other):
        for number in range(60):
            assert one.sync(other, add, number) == number + 1
            one.future(other, add, number).wait()

    threads = [threading.Thread(target=run, args=ends) for ends in ((a, b), (b, a), (a, b), (b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = made()
    events = check(found)
    assert [len(part.made) for part in found.parts] == [240, 240]
    assert [len(part.served) for part in found.parts] == [240, 240]
    numbers = [each.number for each in found.parts[0].made]
    assert len(set(numbers)) == 240
    assert sum(e["ph"] == "s" for e in events) == 2 * 480


def test_too_many_calls_are_counted(pair, monkeypatch):
    a, b, made = pair
    monkeypatch.setattr(trace, "MOST_CALLS", 3)
    for number in range(5):
        a.sync(b, add, number)
    found = made().to_dict()
    assert found["otherData"]["dropped_calls"] == {"a": 2, "b": 2}
    check(made())


def test_other_clocks_are_corrected_and_their_error_is_stated():
    here = Part("a", "h0", 0, 10, threads={1: "main"})
    there = Part("b", "h1", 1, 20, threads={2: "serves"})
    here.made.append(Made(1, "sync", "f", 1, 1, 100.0, 100.001, 100.010, 1))
    run = (2, 5100.004, 5100.006)  # its clock is ahead by 5,000 s
    there.served.append(Served(0, 1, "f", 5100.003, 5100.0035, [run], (2, 5100.006, 5100.007)))
    made = Trace([(there, Clock(5000.0, 25e-6)), (here, Clock())])
    events = check(made)
    (served,) = (each for each in slices(events, "f") if each["pid"] == 1)
    assert served["ts"] == pytest.approx(100.004e6) and served["dur"] == pytest.approx(2000)
    assert made.to_dict()["otherData"]["clock_errors_us"] == {"a": 0, "b": pytest.approx(25)}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["a (h0, pid 10)", "b (h1, pid 20), clock ±25 us"]


def run_on_alice(x):
    return rpc.rpc_sync("bob", add, args=(x,))


def test_a_group_of_processes_is_traced_from_one_of_them(workers, tmp_path):
    path = tmp_path / "trace.json"
    with rpc.profile(path) as made:
        rpc.rpc_sync("alice", run_on_alice, args=(torch.ones(3),))
        future = rpc.rpc_async("bob", add, args=(1,))
        rref = rpc.remote("alice", add, args=(torch.ones(2),))
        assert rref.rpc_sync().sum().item() == 4
        assert future.wait() == 2
        with pytest.raises(RuntimeError, match="is being traced: one trace at a time"):
            with rpc.profile():
                pass
    events = check(made)
    assert events == json.loads(path.read_text())["traceEvents"]
    assert sorted(part.name for part in made.parts) == ["alice", "bob", "driver"]
    assert made.parts[0].name == "driver"
    assert len({part.pid for part in made.parts}) == 3
    assert set(made.clocks.values()) == {Clock()}  # one host
    assert len(slices(events, "test_trace.add -> bob")) == 2
    callers = {e["pid"] for e in slices(events, "test_trace.add -> bob")}
    assert callers == {rpc.get_worker_info(name).id for name in ("driver", "alice")}
    assert slices(events, "sum -> alice")
    before = len(made.parts[0].made)
    rpc.rpc_sync("alice", add, args=(1,))
    assert len(made.parts[0].made) == before  # it has ended
    with rpc.profile() as again:
        rpc.rpc_sync("alice", add, args=(1,))
    assert len(again.parts[0].made) == 1


def test_a_worker_that_dies_is_left_out_of_the_trace(workers, caplog):
    group = rpc.start_workers(["carol"])
    with rpc.profile() as made:
        rpc.rpc_sync("carol", add, args=(1,))
        group.stop()
    assert "carol" not in [part.name for part in made.parts]
    assert "the trace lacks the calls of RPC worker 'carol'" in caplog.text
    assert len(slices(check(made), "test_trace.add -> carol")) == 1


def test_a_worker_that_begins_late_does_not_go_on_recording(workers, monkeypatch):
    alice = rpc.rpc_sync("alice", os.getpid)
    monkeypatch.setattr(observe, "START_SECONDS", 0.2)
    os.kill(alice, signal.SIGSTOP)
    try:
        assert eventually(lambda: thread_states(alice) == {"T"})
        with pytest.raises(CallTimeoutError), rpc.profile():
            pass
    finally:
        os.kill(alice, signal.SIGCONT)
    monkeypatch.undo()
    with rpc.profile() as made:
        rpc.rpc_sync("alice", add, args=(1,))
    assert sorted(part.name for part in made.parts) == ["alice", "bob", "driver"]


def test_a_trace_that_has_ended_begins_nowhere(monkeypatch):
    with memory_group() as start:
        agent = start("a").agent
        monkeypatch.setattr(current, "get_agent", lambda: agent)
        assert trace.stop("late") is None
        trace.start("late")
        assert not agent.hooks
        trace.start("next")
        (hook,) = agent.hooks
        assert isinstance(hook, TraceHook) and hook.run == "next"
        assert trace.stop("next") is not None and not agent.hooks
