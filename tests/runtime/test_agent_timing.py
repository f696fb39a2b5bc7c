"""What the workers of a group do in time: in virtual time, under many schedules."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import memory_workers
import pytest
from memory_workers import MemoryWorker, memory_group
from simulation.separately import in_virtual_time
from simulation.workers import wait
from torch.futures import Future

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.membership import Change
from rayrpc._protocol.messages import Kind
from rayrpc._protocol.transport import PendingReply
from rayrpc._runtime import agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._transports.memory import MemoryTransport
from rayrpc.errors import CallError, CallLostError, CallTimeoutError, GroupError, WorkerDiedError
from rayrpc.functions import async_execution

LONG = 1000.0  # seconds, as all times here: no call that ends takes so long
SHORT = 1.0
FROZEN = 10.0  # that a schedule may keep a thread from running

virtual = functools.partial(in_virtual_time, "memory_workers")


@contextlib.contextmanager
def group(*names: str, **options: Any) -> Iterator[list[MemoryWorker]]:
    """Start the workers of a group; what they still run ends with it."""
    kept.clear()
    kept["go"] = threading.Event()
    with memory_group() as start:
        try:
            yield [start(name, **options) for name in names]
        finally:
            kept["go"].set()


def spawn(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def soon(ready):
    """Return whether something becomes true that takes locks to be looked at."""
    end = time.monotonic() + LONG
    while not ready() and time.monotonic() < end:
        time.sleep(0.1)
    return ready()


# -- what is called; all workers see the same globals ---------------------------------------------

kept: dict[str, Any] = {}


def add(x, y):
    return x + y


def give_back(thing):
    return thing


def stay():
    """Wait until the test says ``go``, in the thread of the call."""
    kept["begun"] = kept.get("begun", 0) + 1
    kept["go"].wait(LONG)
    return "stayed"


@async_execution
def stay_later():
    """Do so in no thread."""
    kept["begun"] = kept.get("begun", 0) + 1
    kept["future"] = Future()
    return kept["future"]


def read_all(rrefs):
    return [rref.to_here() for rref in rrefs]


def run_task():
    return kept["task"]()


def has_begun(calls=1):
    return soon(lambda: kept.get("begun", 0) >= calls)


# -- limits ----------------------------------------------------------------------------------------


@virtual()
def test_no_more_functions_run_at_a_time_than_there_are_threads():
    with group("a", "b", num_worker_threads=2) as (a, b):
        running, most = [], [0]

        def task():
            running.append(1)
            most[0] = max(most[0], len(running))
            time.sleep(SHORT)
            running.pop()

        kept["task"] = task
        began = time.monotonic()
        for future in [a.future(b, run_task) for _ in range(6)]:
            wait(future)
        assert most == [2]
        assert time.monotonic() - began >= 3 * SHORT


@virtual()
def test_a_call_that_takes_longer_than_its_timeout_ends_in_torchs_words():
    text = r"RPC ran for more than set timeout \(1000 ms\) and will now be marked with an error"
    with group("a", "b") as (a, b):
        for call in (
            lambda: a.sync(b, stay, timeout=SHORT),
            lambda: wait(a.future(b, stay, timeout=SHORT)),
        ):
            began = time.monotonic()
            with pytest.raises(CallTimeoutError, match=text):
                call()
            assert 0 <= time.monotonic() - began - SHORT < FROZEN


@virtual()
def test_an_rref_whose_creation_timed_out_says_so():
    with group("a", "b") as (a, b):
        rref = a.remote(b, stay, timeout=SHORT)
        assert soon(lambda: rref._get_future().done())
        with pytest.raises(CallTimeoutError, match=r"RRef creation via rpc\.remote timed out"):
            rref.to_here()


@virtual()
def test_a_wait_ends_when_the_value_is_no_longer_wanted():
    with group("a", "b") as (a, b):
        unwanted = threading.Event()
        value = a.agent.caller.start(a.find(b), Invocation(stay, ()), None)
        threading.Timer(SHORT, unwanted.set).start()
        with pytest.raises(CallTimeoutError):
            value(unwanted.is_set)
        assert b.agent.callee.active == 1  # it runs on: the wait ended before the call
        kept["go"].set()
        assert soon(lambda: a.agent.caller.active == b.agent.callee.active == 0)


# -- RRefs -----------------------------------------------------------------------------------------


@virtual()
def test_rrefs_in_a_reply_that_came_too_late_are_released():
    def slow():
        stay()
        return kept["rref"]

    with group("a", "b") as (a, b):
        kept["task"] = slow
        kept["rref"] = b.remote(b, add, 1, 2)
        with pytest.raises(CallTimeoutError):
            a.sync(b, run_task, timeout=SHORT)
        with pytest.raises(CallTimeoutError):
            wait(a.future(b, run_task, timeout=SHORT))
        kept["go"].set()
        assert soon(lambda: b.agent.callee.active == 0)
        assert soon(lambda: a.is_empty() and b.is_empty())


@virtual()
def test_an_rref_lives_until_the_request_for_its_value_has_arrived():
    with group("a", "b") as (a, b):
        rref = a.remote(b, add, 1, 2)
        assert rref.to_here() == 3
        send, late = a.agent.caller._send, []

        def send_later(to, frame):
            if frame.kind is not Kind.FETCH:
                return send(to, frame)
            pending = PendingReply()
            late.append(lambda: pending.follow(send(to, frame)))
            return pending

        with mock.patch.object(a.agent.caller, "_send", send_later):
            with contextlib.suppress(CallTimeoutError):
                rref.to_here(SHORT)
            del rref
            a.agent.rrefs.flush()
            time.sleep(LONG)
            assert b.table.owned
            late.pop()()
        assert soon(lambda: a.is_empty() and b.is_empty())


class SlowTransport(MemoryTransport):
    """Deliver frames in any order, and lose some of those that only carry the protocol."""

    random = random.Random(7)

    def call(self, peer, frame):
        pending = PendingReply()
        if frame.kind is Kind.CONTROL and self.random.random() < 0.1:
            pending.complete(Error(CallLostError("lost by the test")))
            return pending
        send = super().call

        def later():
            pending.follow(send(peer, frame))

        threading.Timer(self.random.random() * SHORT, later).start()
        return pending


@virtual(seeds=10)
def test_whatever_the_order_of_frames_all_tables_end_up_empty():
    slow = mock.patch.object(memory_workers, "MemoryTransport", SlowTransport)
    with slow, group("a", "b", "c") as workers:

        def work(worker, rnd):
            rrefs = []
            for step in range(10):
                to = rnd.choice(workers)
                rrefs += [worker.remote(to, add, step, 1) for _ in range(2)]
                some = rnd.sample(rrefs, min(3, len(rrefs)))
                assert worker.sync(to, read_all, some) == [rref.to_here() for rref in some]
                rrefs += wait(worker.future(rnd.choice(workers), give_back, some))
                del rrefs[: rnd.randrange(5)]

        threads = [spawn(work, each, random.Random(i)) for i, each in enumerate(workers)]
        for thread in threads:
            thread.join()
        gc.collect()
        assert soon(lambda: all(worker.is_empty() for worker in workers))


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["stay", "stay_later"])
@pytest.mark.parametrize("way", ["sync", "future", "remote"])
@virtual(seeds=10)
def test_a_death_ends_the_calls_that_wait_for_it_at_once(function, way):
    with group("a", "b") as (a, b):
        ways = {
            "sync": lambda called: a.sync(b, called, timeout=LONG),
            "future": lambda called: wait(a.future(b, called, timeout=LONG)),
            "remote": lambda called: a.remote(b, called, timeout=LONG).to_here(),
        }

        def call():
            with pytest.raises(WorkerDiedError) as raised:
                ways[way](globals()[function])
            kept["error"] = raised.value

        caller = spawn(call)
        assert has_begun()
        time.sleep(SHORT)  # to_here() is under way by then
        began = time.monotonic()
        b.die()
        caller.join()
        assert time.monotonic() - began < FROZEN
        assert (kept["error"].worker, kept["error"].cause) == ("b", "killed by the test")


@virtual()
def test_a_loss_ends_a_call_of_which_the_transport_learns_nothing():
    with group("a", "b") as (a, b):
        member = a.find(b)
        loss = [Change(0, "died", member, "silent")]
        threading.Timer(SHORT, a.agent._apply, [loss]).start()
        silent = mock.patch.object(a.transport, "call", lambda peer, frame: PendingReply())
        with silent, pytest.raises(WorkerDiedError, match="silent"):
            a.agent.caller.sync(member, Invocation(add, (1, 2)), LONG)


# -- leaving ---------------------------------------------------------------------------------------


@virtual()
def test_a_leaving_worker_replies_first_to_the_calls_that_it_serves():
    with group("a", "b") as (a, b):
        futures = [a.future(b, stay) for _ in range(2)]
        assert has_begun(2)
        threading.Timer(SHORT, kept["go"].set).start()
        b.agent.shutdown()
        assert [wait(future) for future in futures] == ["stayed", "stayed"]


@virtual()
def test_a_leaving_worker_waits_for_no_function_that_stays():
    with group("a", "b") as (a, b):
        future = a.future(b, stay)
        assert has_begun()
        began = time.monotonic()
        b.agent.shutdown()
        assert 0 <= time.monotonic() - began - agent.REPLY_SECONDS < FROZEN
        with pytest.raises(WorkerDiedError, match="it has left the group"):
            wait(future)


@virtual()
def test_shutdown_ends_blocking_calls_of_other_threads():
    def call(worker, callee):
        with pytest.raises(CallError, match="shut down on this worker"):
            worker.sync(callee, stay, timeout=None)

    with group("a", "b") as (a, b):
        caller = spawn(call, a, b)
        assert has_begun()
        a.agent.shutdown()
        caller.join(FROZEN)
        assert not caller.is_alive()


@virtual()
def test_join_waits_for_calls_of_all_members():
    with group("a", "b") as (a, b):
        future = a.future(b, stay)
        ends: list[str] = []

        def join(worker):
            worker.agent.join(timeout=LONG)
            ends.append(worker.name)

        threads = [spawn(join, worker) for worker in (a, b)]
        time.sleep(SHORT)
        assert ends == []
        kept["go"].set()
        for thread in threads:
            thread.join()
        assert sorted(ends) == ["a", "b"]
        assert wait(future) == "stayed"


@virtual()
def test_join_names_the_members_that_do_not_come():
    with group("a", "b") as (a, _):
        began = time.monotonic()
        with pytest.raises(GroupError, match="b"):
            a.agent.join(timeout=SHORT)
        assert 0 <= time.monotonic() - began - SHORT < FROZEN
