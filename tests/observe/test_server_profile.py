"""The profile of all calls that a worker serves, and how long these wait for Python's lock."""

# torch's stubs have no legacy profiler
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import pytest
import torch
from memory_workers import memory_group
from torch.autograd import profiler_legacy

from rayrpc._observe import server_profile
from rayrpc._observe.profiler import ProfilerHook
from rayrpc._runtime import current
from rayrpc._runtime.native_names import enable_gil_profiling

_autograd: Any = torch.autograd
CONFIG = _autograd.ProfilerConfig(
    _autograd.ProfilerState.CPU,
    False,
    False,
    False,
    False,
    False,
    torch._C._profiler._ExperimentalConfig(),
)


@pytest.fixture
def pair():
    """Two workers; the second one is the one that is profiled."""
    with memory_group() as start:
        a, b = (start(name, hooks=[ProfilerHook(number)]) for number, name in enumerate("ab"))
        current.set_agent(b.agent)
        yield a, b
        current.set_agent(None)
        assert not b.agent.callee.around and not server_profile._profiles


def names(records):
    """Return the names of the events of each call."""
    return [
        [event.name for event in profiler_legacy._parse_legacy_records(each) if "::" in event.name]
        for each in records
    ]


def fails(x):
    torch.mul(x, x)
    raise ValueError("no")


def test_each_call_is_recorded_in_all_profiles_that_are_on(pair):
    a, b = pair
    x = torch.ones(2)
    a.sync(b, torch.neg, x)
    server_profile._enable_server_process_global_profiler(CONFIG)
    a.sync(b, torch.add, x, x)
    server_profile._enable_server_process_global_profiler(CONFIG)
    a.sync(b, torch.sub, x, x)
    with pytest.raises(ValueError, match="no"):
        a.sync(b, fails, x)
    b.sync(a, torch.div, x, x)  # served by the other one, which is not profiled ... in its process
    inner = server_profile._disable_server_process_global_profiler()
    a.sync(b, torch.exp, x)
    outer = server_profile._disable_server_process_global_profiler()
    a.sync(b, torch.neg, x)
    assert names(inner) == [["aten::sub"], ["aten::mul"]]
    assert names(outer) == [["aten::add"], ["aten::sub"], ["aten::mul"], ["aten::exp"]]
    with pytest.raises(RuntimeError, match="no profile"):
        server_profile._disable_server_process_global_profiler()


def test_a_call_that_its_caller_has_recorded_is_left_to_the_caller(pair):
    a, b = pair
    x = torch.ones(2)
    server_profile._enable_server_process_global_profiler(CONFIG)
    with profiler_legacy.profile() as recorded:
        a.sync(b, torch.add, x, x)
    records = server_profile._disable_server_process_global_profiler()
    assert names(records) == []
    assert any(event.name.endswith("aten::add") for event in recorded.function_events)


def test_waits_for_the_lock_are_measured_while_that_is_on(pair):
    a, b = pair
    key = "agent.gil_average_wait_time_us"
    assert key not in b.agent.get_debug_info()
    enable_gil_profiling(True)
    assert b.agent.get_debug_info()[key] == "0.0"
    for _ in range(3):
        a.sync(b, len, "abc")
    assert 0 < float(b.agent.get_debug_info()[key]) < 1e6
    assert b.agent._gil_waits._count == 3
    enable_gil_profiling(True)
    assert b.agent.get_debug_info()[key] == "0.0"  # anew
    enable_gil_profiling(False)
    enable_gil_profiling(False)
    assert key not in b.agent.get_debug_info()
