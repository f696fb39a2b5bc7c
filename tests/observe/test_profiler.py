"""Profiles of torch's legacy profiler: calls, and what their callees have done."""

# torch's stubs have no legacy profiler
# mypy: disable-error-code="no-untyped-call"

import threading
from typing import Any

import pytest
import torch
from conftest import eventually
from memory_workers import memory_group
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

from rayrpc._observe import legacy_profile
from rayrpc._observe.legacy_profile import REMOTE_OP, Event, Recording
from rayrpc._observe.profiler import ProfilerHook, profiling_key

KEY = profiling_key("sync", "aten::add", "a", "b")


@pytest.fixture
def workers():
    with memory_group() as start:
        yield [start(name, hooks=[ProfilerHook(i)]) for i, name in enumerate("abc")]


def add(x):
    return x + x


def fail(x):
    torch.mul(x, x)
    raise ValueError("no")


group: list[Any] = []
go_on = threading.Event()


def wait():
    return go_on.wait(60)


def by_name(recorded):
    return {event.name: event for event in recorded.function_events}


def test_what_a_callee_does_is_named_by_the_call(workers):
    a, b, _ = workers
    with profile(record_shapes=True, profile_memory=True) as recorded:
        torch.ones(2)
        a.sync(b, torch.add, torch.ones(100), torch.ones(100))
    events = by_name(recorded)
    call, there = events[KEY], events[f"{KEY}{REMOTE_OP}aten::add"]
    assert (call.node_id, there.node_id, events["aten::ones"].node_id) == (0, 1, 0)
    assert there.is_remote and not call.is_remote
    assert there.input_shapes[:2] == [[100], [100]]
    assert there.cpu_memory_usage == 400
    assert call.time_range.start <= there.time_range.start
    assert there.time_range.end <= call.time_range.end


def test_what_a_profile_does_not_record_a_callee_does_not_either(workers):
    a, b, _ = workers
    with profile() as recorded:
        a.sync(b, torch.add, torch.ones(100), torch.ones(100))
    there = by_name(recorded)[f"{KEY}{REMOTE_OP}aten::add"]
    assert not there.input_shapes and not there.cpu_memory_usage


@pytest.mark.parametrize("way", ["async", "remote"])
def test_all_kinds_of_calls_are_recorded(workers, way):
    a, b, _ = workers
    with profile() as recorded:
        if way == "async":
            a.future(b, add, torch.ones(2)).wait()
        else:
            a.remote(b, add, torch.ones(2))._get_profiling_future().wait()
    key = profiling_key(way, "add", "a", "b")
    assert {key, f"{key}{REMOTE_OP}aten::add"} <= set(by_name(recorded))


def forward(x):
    """Run on b: call c."""
    _, b, c = group
    with record_function("forward"):
        return b.sync(c, add, x)


def test_calls_of_a_callee_are_named_by_all_calls(workers):
    a, b, _ = group[:] = workers
    with profile() as recorded:
        a.sync(b, forward, torch.ones(2))
    events = by_name(recorded)
    outer = profiling_key("sync", "forward", "a", "b")
    inner = outer + REMOTE_OP + profiling_key("sync", "add", "b", "c")
    assert events[outer + REMOTE_OP + "forward"].node_id == 1
    assert events[inner].node_id == 1
    assert events[inner + REMOTE_OP + "aten::add"].node_id == 2


def test_a_call_that_fails_leaves_no_recording(workers):
    a, b, _ = workers
    with profile():
        with pytest.raises(ValueError, match="no"):
            a.sync(b, fail, torch.ones(2))
    assert a.sync(b, legacy_profile.current) is None
    with profile() as recorded:
        a.sync(b, torch.add, torch.ones(2), 1)
    assert f"{KEY}{REMOTE_OP}aten::add" in by_name(recorded)


def test_a_call_that_ends_after_the_profile_is_not_waited_for(workers):
    a, b, _ = workers
    go_on.clear()
    with profile() as recorded:
        future = a.future(b, wait)
    go_on.set()
    assert future.wait() and eventually(lambda: not a.agent.caller.active)
    assert not [event for event in recorded.function_events if event.is_remote]


def test_nothing_is_recorded_without_a_profile(workers):
    a, b, _ = workers
    with torch.profiler.profile() as recorded:  # which torch's own calls are not in, either
        a.sync(b, torch.add, torch.ones(2), 1)
    assert a.sync(b, legacy_profile.current) is None
    assert not [event for event in recorded.events() if "rpc_" in event.name]


def test_events_of_a_callee_are_in_the_middle_of_their_call():
    class Now(Recording):
        now = 1500.0

    recording = Now({}, is_remote=False)
    recording.add("key", 500.0, [Event("op", 1, 5.0, 10.0, {})], 200.0)
    assert recording.events == [Event(f"key{REMOTE_OP}op", 1, 905.0, 910.0, {})]
