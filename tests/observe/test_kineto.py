"""Calls in torch's profiles: rows at the caller and the callee, and profiles that end before."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import eventually
from memory_workers import memory_group
from torch.profiler import ProfilerActivity, profile

import rayrpc as rpc
from rayrpc import config
from rayrpc._observe import kineto
from rayrpc._observe.kineto import Event, KinetoHook
from rayrpc._observe.profiler import profiling_key
from rayrpc.errors import SerializationError

CPU = [ProfilerActivity.CPU]
KEY = profiling_key("sync", "add", "a", "b")


def of_all_threads():
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch has no profile of all threads")
    return profile(activities=CPU, experimental_config=config)


@pytest.fixture
def workers():
    with memory_group() as start:
        found = [start(name) for name in "ab"]
        for worker in found:
            worker.agent.hooks.append(KinetoHook(worker.agent.callee.around))
        go_on.clear()
        yield found
        go_on.set()
    assert not kineto._open


go_on = threading.Event()


def add(x):
    return x + x


def fail(x):
    raise ValueError("no")


def wait(x=None):
    go_on.wait(60)
    return x


def names(recorded):
    return [event.name for event in recorded.events()]


def test_a_call_is_a_row_with_the_time_until_its_reply(workers, tmp_path):
    a, b = workers
    with profile(activities=CPU) as recorded:
        a.sync(b, add, torch.ones(2))
        future = a.future(b, wait)
        torch.ones(3)
        threading.Timer(0.05, go_on.set).start()
        future.wait()
        a.remote(b, add, torch.ones(2)).to_here()
    key = profiling_key("async", "wait", "a", "b")
    assert {KEY, key, profiling_key("remote", "add", "a", "b"), "aten::ones"} <= {*names(recorded)}
    row = next(event for event in recorded.events() if event.name == key)
    assert 50e3 < row.time_range.elapsed_us() < 20e6
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    assert KEY in {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_call_that_fails_is_a_row_too(workers):
    a, b = workers
    with profile(activities=CPU) as recorded:
        with pytest.raises(ValueError, match="no"):
            a.sync(b, fail, torch.ones(2))
        with pytest.raises(SerializationError):
            a.sync(b, add, threading.Lock())
    assert profiling_key("sync", "fail", "a", "b") in names(recorded)
    assert not kineto._open


def test_the_autograd_profiler_has_rows(workers):
    a, b = workers
    with torch.autograd.profiler.profile() as recorded:
        a.sync(b, add, torch.ones(2))
    assert KEY in {event.name for event in recorded.function_events}


def test_where_a_profile_is_of_all_threads_a_callee_has_the_function_as_a_row(workers):
    a, b = workers
    with of_all_threads() as recorded:
        a.sync(b, add, torch.ones(2))
    assert KEY in names(recorded) and f"{__name__}.add" in names(recorded)
    assert kineto._served not in b.agent.callee.around


def test_nothing_is_kept_without_a_profile(workers):
    a, b = workers
    a.sync(b, add, torch.ones(2))
    assert a.agent.callee.around == [] and not kineto._open


def test_a_worker_that_joins_during_a_profile_has_rows():
    with of_all_threads() as recorded, memory_group() as start:
        a, b = (start(name) for name in "ab")
        hook = KinetoHook(b.agent.callee.around)
        b.agent.hooks.append(hook)
        a.sync(b, add, torch.ones(2))
    assert f"{__name__}.add" in names(recorded)
    assert all(around is not hook._around for around in kineto._workers)


@pytest.mark.parametrize("make", [lambda: profile(activities=CPU), of_all_threads])
def test_a_call_that_is_open_when_its_profile_stops_ends_with_it(workers, make):
    """Kineto would write the end of its row into memory that is not the profile's any more."""
    a, b = workers
    for _ in range(20):
        go_on.clear()
        with make() as recorded:
            futures = [a.future(b, wait) for _ in range(3)]
        assert not kineto._open
        with make() as second:
            torch.ones(2)
            go_on.set()
            torch.futures.wait_all(futures)
        key = profiling_key("async", "wait", "a", "b")
        rows = [event for event in recorded.events() if event.name == key]
        assert len(rows) == 3 and all(0 <= row.time_range.elapsed_us() < 20e6 for row in rows)
        assert key not in names(second)
        del recorded, second
        gc.collect()


def test_calls_of_threads_go_on_while_profiles_start_and_stop(workers, quick_switches):
    a, b = workers
    is_over = threading.Event()
    profiles = [of_all_threads() for _ in range(10)]

    def call():
        count = 0
        while not is_over.is_set():
            a.sync(b, add, torch.ones(2))
            a.future(b, add, torch.ones(2)).wait()
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(call) for _ in range(2)]
        found = 0
        for each in profiles:
            with each as recorded:
                for _ in range(5):
                    a.sync(b, add, torch.ones(2))
            found += names(recorded).count(KEY)
        is_over.set()
        assert all(run.result(60) for run in runs)
    assert found >= 50
    assert eventually(lambda: not kineto._open)
    assert kineto._stopping == kineto._on == 0


def test_no_event_is_opened_while_a_profile_stops():
    kineto._started()
    kineto._stop()
    try:
        with Event("late"):
            assert not kineto._open
    finally:
        kineto._stopped()


def test_profiles_for_other_tools_record_no_calls(workers):
    a, _ = workers
    hook = next(hook for hook in a.agent.hooks if isinstance(hook, KinetoHook))
    assert not hook.wants()
    with torch.autograd.profiler_legacy.profile():
        assert not hook.wants()
    with profile(activities=CPU):
        assert hook.wants()


@pytest.mark.ray
@pytest.mark.parametrize("is_on", [True, False])
def test_the_setting_decides_whether_calls_have_rows(ray_cluster, is_on):
    config.configure(profile_calls=is_on)
    try:
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=alone())
        with profile(activities=CPU) as recorded:
            rpc.rpc_sync("alone", add, args=(torch.ones(2),))
    finally:
        rpc.shutdown()
        config.configure()
    key = profiling_key("sync", "add", "alone", "alone")
    assert (key in names(recorded)) == is_on


def alone():
    return rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:29573")
