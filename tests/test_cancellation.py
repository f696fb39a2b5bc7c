"""Cancelled calls on workers of their own processes: by the program, by Ctrl-C, by force."""

import asyncio
import itertools
import random
import signal
import sys
import time
from typing import Any, cast

import pytest
import targets
import torch
from conftest import IS_MEASURED, ROOT, eventually, python_path, run_in_threads
from docstrings import run_example

import rayrpc as rpc
from rayrpc import cancellation, errors

WAIT = 60.0


@pytest.fixture(autouse=True)
def clean(workers):
    targets.log.clear()
    for name in workers:
        rpc.rpc_sync(name, targets.take_log)


def served(name):
    """Return how many calls a worker serves, this one included."""
    return rpc.rpc_sync(name, targets.served)


def owned(name):
    """Return how many RRefs a worker owns."""
    return rpc.rpc_sync(name, targets.count_owned)


def has_logged(name, *what):
    """Return what tells whether a worker has noted this, in order."""
    noted: list[Any] = []

    def check():
        noted.extend(rpc.rpc_sync(name, targets.take_log))
        return noted == [*what]

    return check


def test_a_function_that_runs_is_interrupted(workers):
    future = rpc.rpc_async("alice", targets.spin)
    assert eventually(has_logged("alice", "begun"))
    start = time.monotonic()
    assert rpc.cancel(future)
    with pytest.raises(errors.CancelledError, match="spin on RPC worker 'alice' was cancelled"):
        future.wait()
    assert eventually(has_logged("alice", "CancelledError", "ended"))
    assert time.monotonic() - start < WAIT / 4
    assert not rpc.cancel(future)


def test_a_coroutine_and_what_it_waits_for_are_cancelled(workers):
    future = rpc.rpc_async("alice", targets.await_spin, args=("bob",))
    assert eventually(has_logged("bob", "begun"))
    assert rpc.cancel(future)
    assert eventually(has_logged("bob", "CancelledError", "ended"))
    assert eventually(has_logged("alice", "CancelledError"))


def test_a_blocking_call_within_a_function_is_cancelled_with_it(workers):
    future = rpc.rpc_async("alice", targets.call_on, args=("bob", targets.spin))
    assert eventually(has_logged("bob", "begun"))
    assert rpc.cancel(future)
    assert eventually(has_logged("bob", "CancelledError", "ended"))
    # the thread of alice is free again
    assert rpc.rpc_sync("alice", max, args=(1, 2)) == 2


def test_calls_of_this_process_itself_are_cancelled(workers):
    future = rpc.rpc_async("driver", targets.spin)
    assert eventually(lambda: targets.log == ["begun"])
    assert rpc.cancel(future)
    assert eventually(lambda: targets.log == ["begun", "CancelledError", "ended"])


def test_a_stream_of_a_cancelled_function_is_closed(workers):
    future = rpc.rpc_async("alice", targets.total, args=("bob", 10**9))
    assert eventually(lambda: rpc.rpc_sync("bob", targets.take_log))
    assert rpc.cancel(future)
    assert eventually(lambda: "closed" in rpc.rpc_sync("bob", targets.take_log))


def test_all_calls_of_rpc_all_are_cancelled(workers):
    future = rpc.get_group().rpc_all("[ab]*", targets.spin)
    for name in workers:
        assert eventually(has_logged(name, "begun"))
    assert rpc.cancel(future) and not rpc.cancel(future)
    with pytest.raises(errors.GroupCallError) as raised:
        future.wait()
    assert {name: type(error) for name, error in raised.value.errors.items()} == dict.fromkeys(
        workers, errors.CancelledError
    )
    for name in workers:
        assert eventually(has_logged(name, "CancelledError", "ended"))


def test_with_force_the_process_ends(workers):
    rpc.start_workers(["stuck"])
    other = rpc.rpc_async("stuck", targets.spin)
    future = rpc.rpc_async("stuck", time.sleep, args=(WAIT,))
    assert rpc.cancel(future, force=True)
    with pytest.raises(errors.CancelledError):
        future.wait()
    with pytest.raises(errors.WorkerDiedError, match="stuck"):
        other.wait()


def test_with_force_an_attached_worker_lives_on(workers):
    future = rpc.rpc_async("driver", targets.spin)
    assert eventually(lambda: targets.log == ["begun"])
    assert rpc.cancel(future, force=True)
    assert eventually(lambda: targets.log == ["begun", "CancelledError", "ended"])


def test_other_futures_cannot_be_cancelled(workers):
    future: Any = torch.futures.Future()
    assert not rpc.cancel(future) and not future.done()
    done = rpc.rpc_async("alice", max, args=(1, 2))
    done.wait()
    assert not rpc.cancel(done)
    with pytest.raises(TypeError, match=r"cancel takes a torch\.futures\.Future, got 3"):
        rpc.cancel(cast(Any, 3))


def test_a_call_in_an_autograd_context_and_in_a_profile(workers):
    with rpc.autograd.context(), torch.autograd.profiler.profile():
        future = rpc.rpc_async("alice", targets.spin)
        assert eventually(has_logged("alice", "begun"))
        assert rpc.cancel(future)
        with pytest.raises(errors.CancelledError):
            future.wait()
    assert eventually(has_logged("alice", "CancelledError", "ended"))


def test_many_threads_cancel_calls_of_two_workers(workers, quick_switches):
    counts = itertools.count()

    def run(to, func):
        for number in range(25):
            future = rpc.rpc_async(to, func, args=(0.004 * (number % 5), number))
            if number % 5:
                time.sleep(0.003 * (number % 4))
            else:
                future.wait()  # or, on a busy machine, all might be cancelled
            if rpc.cancel(future):
                with pytest.raises(errors.CancelledError):
                    future.wait()
                next(counts)
            else:
                assert future.wait() == number

    ways = itertools.product(("alice", "bob"), (targets.nap, targets.nap_async))
    run_in_threads(run, ways, WAIT)
    assert 0 < next(counts) < 100
    agent = rpc._get_current_rpc_agent()
    assert eventually(lambda: not agent.caller.active)
    for name in workers:
        assert [rpc.rpc_sync(name, max, args=(n, 0)) for n in range(50)] == list(range(50))


# With a tracer, no thread of Python 3.11 begins a function until the interrupt is raised: here, by
# a thread that waits for a reply, which another reads.
@pytest.mark.skipif(IS_MEASURED, reason="traced threads of Python 3.11 wait for interrupted ones")
def test_functions_that_call_are_cancelled_at_any_point(workers):
    before = {name: rpc.rpc_sync(name, sys.getswitchinterval) for name in workers}
    order = random.Random(7)

    def run(to, other, seed):
        order = random.Random(seed)
        for _ in range(20):
            future = rpc.rpc_async(to, targets.chatter, args=(other, 10**9), timeout=0)
            time.sleep(order.uniform(0.01, 0.06))
            assert rpc.cancel(future)
            with pytest.raises(errors.CancelledError):
                future.wait()
            # a slow machine cancels calls faster than their functions end
            assert eventually(lambda: served(to) < 8)

    for name in workers:
        rpc.rpc_sync(name, sys.setswitchinterval, args=(1e-4,))
    try:
        ways = [("alice", "bob"), ("bob", "alice"), ("alice", "driver"), ("alice", "alice")]
        run_in_threads(run, [(*way, order.random()) for way in ways], WAIT)
    finally:
        for name, seconds in before.items():
            rpc.rpc_sync(name, sys.setswitchinterval, args=(seconds,))
    # nothing is left of them, and all ways go on
    assert eventually(lambda: all(served(name) == 1 for name in workers))
    for to, other in (("alice", "bob"), ("bob", "alice"), ("alice", "driver")):
        assert rpc.rpc_sync(to, targets.chatter, args=(other, 20)) == 20
    assert eventually(lambda: all(owned(name) == 0 for name in workers))


INTERRUPTED = """
import sys
import targets
import rayrpc as rpc

rpc.start_workers(["alice"])
try:
    print("waits", flush=True)
    rpc.rpc_sync("alice", targets.spin, timeout=0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
while "ended" not in (noted := rpc.rpc_sync("alice", targets.take_log)):
    pass
print(noted[-2:], flush=True)
rpc.shutdown()
"""


def test_ctrl_c_cancels_the_call_that_it_interrupts(ray_cluster, start, script):
    path = python_path(ROOT, ROOT / "tests")
    run = start(script(INTERRUPTED), RAY_ADDRESS=ray_cluster, PYTHONPATH=path)
    run.wait_for("waits")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("interrupted")
    run.wait_for("['CancelledError', 'ended']")
    assert run.end() == 0


def test_the_examples_of_the_docstring_run(workers):
    if "worker1" not in {info.name for info in rpc._get_current_rpc_agent().get_worker_infos()}:
        rpc.start_workers(["worker1"])
    run_example(cancellation.cancel, rpc=rpc, time=time, asyncio=asyncio)
