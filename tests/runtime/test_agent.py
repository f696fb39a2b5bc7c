"""Whole workers, several in this process: calls, RRefs, limits, deaths and leaving."""

from __future__ import annotations

import functools
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import eventually
from memory_workers import WAIT, MemoryWorker, memory_group

from rayrpc._concurrency.outcome import Value
from rayrpc._protocol.membership import Change, Member
from rayrpc._protocol.messages import Kind
from rayrpc._runtime import caller as caller_module
from rayrpc._runtime.invocation import Invocation
from rayrpc._transports.memory import MemoryDirectory, MemoryHub
from rayrpc.errors import (
    CallError,
    CallTimeoutError,
    GroupError,
    RpcError,
    SerializationError,
    WorkerDiedError,
)
from rayrpc.functions import async_execution


@pytest.fixture
def start():
    with memory_group() as start:
        yield start
        for event in _events.values():
            event.set()
        _events.clear()
        kept.clear()


@pytest.fixture
def a(start):
    return start("a")


@pytest.fixture
def b(a, start):
    return start("b")


@pytest.fixture
def c(b, start):
    return start("c")


# What is called; all workers are in this process and see the same globals

_events: dict[str, threading.Event] = {}
kept: dict[str, Any] = {}


def event(name):
    return _events.setdefault(name, threading.Event())


def add(x, y):
    return x + y


def wait_for(name):
    event("begun").set()
    event(name).wait(WAIT)
    return name


def fail(text):
    raise KeyError(text)


def add_one_in_place(tensor):
    return tensor.add_(1)


def keep(name, thing):
    kept[name] = thing


def owner_of(rref):
    return rref.owner_name()


def read(rref):
    return rref.to_here()


def read_all(rrefs):
    return [rref.to_here() for rref in rrefs]


def give_back(thing):
    return thing


@async_execution
def later(name):
    """Complete when the event is set; no thread waits for it."""
    future = torch.futures.Future()
    kept.setdefault("later", []).append((name, future))
    event("begun").set()
    return future


@async_execution
def no_future():
    return 1


class Unprintable(Exception):
    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __repr__


def fail_unprintably():
    raise Unprintable


# Calls


def test_a_call_brings_back_its_value(a, b):
    assert a.sync(b, add, 1, 2) == 3
    assert a.future(b, add, 1, 2).wait() == 3
    assert a.remote(b, add, 1, 2).to_here() == 3
    assert b.agent.callee.served == 3
    assert eventually(lambda: a.agent.caller.active == b.agent.callee.active == 0)


def test_a_worker_calls_itself_the_same_way(a):
    assert a.sync(a, add, 1, 2) == 3
    assert a.future(a, add, 1, 2).wait() == 3
    rref = a.remote(a, add, 1, 2)
    assert rref.is_owner()
    assert rref.to_here() == rref.local_value() == 3


@pytest.mark.parametrize("to", ["a", "b"])
def test_tensors_are_copies_on_both_ways(a, b, to):
    sent = torch.zeros(5000)
    got = a.sync(to, add_one_in_place, sent)
    assert sent.sum() == 0
    assert got.add_(1).sum() == 10_000


def test_an_error_is_raised_where_the_value_is_wanted(a, b):
    rref = a.remote(b, fail, "here")
    for get in (
        lambda: a.sync(b, fail, "here"),
        lambda: a.future(b, fail, "here").wait(),
        rref.to_here,
    ):
        with pytest.raises(KeyError, match=r"On WorkerInfo\(id=1, name=b\):"):
            get()


@pytest.mark.parametrize("way", ["at once", pytest.param("busy"), pytest.param("remote")])
def test_an_error_that_cannot_be_printed_still_ends_the_call(a, start, way):
    b = start("b", num_worker_threads=1)
    if way == "busy":
        a.future(b, wait_for, "x")
        assert event("begun").wait(WAIT)
    if way == "remote":
        get = functools.partial(a.remote(b, fail_unprintably).to_here, timeout=WAIT)
    else:
        get = a.future(b, fail_unprintably, timeout=WAIT).wait
    if way == "busy":
        assert eventually(lambda: b.agent.slots.waiting == 1)
    event("x").set()
    with pytest.raises(Exception) as caught:
        get()
    assert not isinstance(caught.value, CallTimeoutError)


def test_what_cannot_be_sent_names_the_call_and_leaves_nothing(a, b):
    with pytest.raises(SerializationError, match="The call of give_back on RPC worker 'b'"):
        a.remote(b, give_back, threading.Lock())
    assert a.is_empty()


def test_a_result_that_cannot_be_sent_is_an_error_of_the_call(a, b):
    with pytest.raises(SerializationError, match="A result of RPC worker 'b'"):
        a.sync(b, threading.Lock)


def test_an_unknown_worker_is_an_error_that_names_the_others(a, b):
    with pytest.raises(RpcError, match=r"destination nobody.*a, b"):
        a.sync("nobody", add, 1, 2)


# Timeouts


def test_a_call_that_is_abandoned_is_active_no_more(a, b):
    call = a.agent.caller.start(a.find(b), Invocation(wait_for, ("go",)), None)
    assert a.agent.caller.active == 1
    call.abandon()
    assert a.agent.caller.active == 0
    event("go").set()
    assert eventually(lambda: b.agent.callee.active == 0)
    assert a.sync(b, add, 1, 2) == 3


@pytest.mark.parametrize("wait", ["_send", "await_reply"])
def test_an_interrupted_call_is_active_no_more(a, b, monkeypatch, wait):
    caller = a.agent.caller
    where = caller if wait == "_send" else caller_module
    going = getattr(where, wait)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, wait, interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.sync(b, add, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        caller.start(a.find(b), Invocation(add, (1, 2)), None)()
    monkeypatch.setattr(where, wait, going)
    assert caller.active == 0
    assert a.sync(b, add, 1, 2) == 3


def test_an_asynchronous_call_that_is_interrupted_as_it_starts_is_active_no_more(a, b, monkeypatch):
    caller = a.agent.caller
    send = caller._send

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(caller, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.future(b, add, 1, 2)
    monkeypatch.setattr(caller, "_send", send)
    assert caller.active == 0 and a.future(b, add, 1, 2).wait() == 3


@pytest.mark.parametrize("way", ["sync", "future"])
def test_the_transport_is_told_of_an_interrupt_just_after_a_request_was_sent(
    a, b, monkeypatch, way
):
    told = []
    send = a.agent.caller._send

    def interrupted(*args):
        send(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(a.agent.caller, "_send", interrupted)
    monkeypatch.setattr(a.agent.caller, "_on_interrupted_send", lambda: told.append(way))
    with pytest.raises(KeyboardInterrupt):
        getattr(a, way)(b, add, 1, 2)
    assert told == [way]


@pytest.mark.parametrize("is_sent", [True, False])
def test_the_rref_of_a_remote_call_that_is_interrupted_as_it_starts_is_deleted(
    a, b, monkeypatch, is_sent
):
    caller = a.agent.caller
    send = caller._send

    def interrupted(to, frame):
        if frame.kind is Kind.REMOTE:
            if is_sent:
                send(to, frame)
            raise KeyboardInterrupt
        return send(to, frame)

    monkeypatch.setattr(caller, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.remote(b, add, 1, 2)
    assert eventually(lambda: b.agent.callee.served == is_sent)
    tables = [each.agent.rrefs._table for each in (a, b)]
    assert eventually(lambda: all(not (t.used or t.owned) and t.is_settled() for t in tables))
    assert caller.active == 0


def test_a_reply_that_is_given_twice_counts_once(a, b):
    future = a.future(b, wait_for, "x")
    (call,) = a.agent.caller._open.values()
    reply = a.agent.caller._send(
        a.find(b), a.agent.caller._request(a.find(b), Invocation(add, (1, 2)), None, [])[1]
    )
    outcome = Value(reply.wait(WAIT))
    call.on_reply(outcome)
    call.on_reply(outcome)
    assert future.wait() == 3 and a.agent.caller.active == 0
    event("x").set()


def test_a_timeout_of_zero_is_none(a, b):
    future = a.future(b, wait_for, "x", timeout=None)
    assert not future.done()
    event("x").set()
    assert future.wait() == "x"


def test_the_default_timeout_is_the_options(start):
    a = start("a", rpc_timeout=7)
    assert a.agent.resolve_timeout(-1) == 7
    assert a.agent.resolve_timeout(0) is None
    with pytest.raises(ValueError):
        a.agent.resolve_timeout(-2)


# Threads


def test_an_async_function_holds_no_thread_while_it_waits(a, start):
    b = start("b", num_worker_threads=1)
    futures = [a.future(b, later, i) for i in range(20)]
    rref = a.remote(b, later, 20)
    assert eventually(lambda: len(kept.get("later", ())) == 21)
    assert a.sync(b, add, 1, 2) == 3
    assert not any(f.done() for f in futures)
    for number, future in reversed(kept.pop("later")):
        future.set_result(number)
    assert [f.wait() for f in futures] == list(range(20))
    assert rref.to_here() == 20


class Waited(torch.futures.Future):
    def wait(self):
        event("waited").set()
        return super().wait()


@async_execution
def done_already(outcome):
    future = Waited()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_the_value_of_a_done_future_is_waited_for_where_streams_may_make_it(
    a, b, monkeypatch, has_accelerator
):
    """A wait has the thread's streams follow the one that makes the value; ``value`` has not."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_accelerator)
    assert a.sync(b, done_already, 3) == 3
    assert event("waited").is_set() == has_accelerator
    with pytest.raises(KeyError, match="none"):
        a.sync(b, done_already, KeyError("none"))


def test_an_async_function_that_fails_later_is_an_error_of_the_call(a, b):
    future = a.future(b, later, "x")
    assert eventually(lambda: "later" in kept)
    kept.pop("later")[0][1].set_exception(KeyError("late"))
    with pytest.raises(KeyError, match="late"):
        future.wait()


def test_an_async_function_must_return_a_future(a, b):
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future.*builtins.int"):
        a.sync(b, no_future)


def test_callbacks_may_call_and_wait_as_deep_as_they_like(a, b):
    def chain(depth):
        if depth == 0:
            return 0
        return a.future(b, add, depth, 0).then(lambda f: f.wait() * 0 + chain(depth - 1)).wait()

    assert chain(20) == 0


# RRefs


def test_the_value_waits_for_a_call_that_overtakes_it(a, b):
    rref = a.remote(b, wait_for, "x")
    reader = threading.Thread(target=lambda: keep("got", rref.to_here()))
    reader.start()
    event("x").set()
    reader.join(WAIT)
    assert kept["got"] == "x"


def test_only_the_owner_has_the_value_itself(a, b):
    rref = a.remote(b, list)
    with pytest.raises(RuntimeError, match="can't call localValue\\(\\) on user"):
        rref.local_value()
    a.sync(b, keep, "rref", rref)
    at_owner = kept["rref"]
    assert at_owner.is_owner()
    at_owner.local_value().append(1)
    assert rref.to_here() == [1]


def test_rrefs_that_go_around_leave_empty_tables(a, b, c):
    rref = a.remote(b, add, 1, 2)
    assert a.sync(c, read, rref) == 3
    assert a.sync(b, read, rref) == 3
    back = a.sync(c, give_back, rref)
    assert back.to_here() == 3
    own = a.remote(a, add, 3, 4)
    assert a.sync(c, read, own) == 7
    assert a.sync(b, give_back, own).is_owner()
    a.sync(c, keep, "rref", rref)
    del rref, back, own
    gc.collect()
    assert eventually(lambda: a.is_empty() and list(b.table.owned) != [])
    assert kept.pop("rref").to_here() == 3
    gc.collect()
    assert eventually(lambda: a.is_empty() and b.is_empty() and c.is_empty())


def test_arguments_are_confirmed_before_the_function_runs(a, b, c):
    rref = a.remote(b, add, 1, 2)
    assert a.sync(c, _is_confirmed, rref)


def _is_confirmed(rref):
    return rref.confirmed_by_owner()


def test_rrefs_of_calls_that_fail_are_released(a, b, c):
    rref = a.remote(b, add, 1, 2)
    with pytest.raises(TypeError):
        a.sync(c, fail, rref, rref)
    with pytest.raises(KeyError):
        a.sync(c, fail, [rref, rref])
    del rref
    gc.collect()
    assert eventually(lambda: a.is_empty() and b.is_empty() and c.is_empty())


@pytest.mark.slow
def test_twenty_thousand_rrefs_leave_no_entries_and_no_growth(a, b):
    def churn(number):
        for _ in range(number // 500):
            rrefs = [a.remote(b, add, i, 1) for i in range(500)]
            assert rrefs[-1].to_here() == 500
            del rrefs
        gc.collect()
        assert eventually(lambda: a.is_empty() and b.is_empty(), WAIT)
        assert eventually(lambda: a.agent.caller.active == b.agent.callee.active == 0)
        return len(gc.get_objects())

    before = churn(1000)
    # a leak of one object a call would be 19,000; what other threads keep is not ours to count
    assert churn(19_000) - before < 6000
    assert not a.agent.rrefs._unconfirmed
    assert not a.agent.caller._open
    assert not any(a.transport._pending.values())


# Deaths


def test_calls_to_a_worker_that_is_gone_fail_at_once(a, b):
    rref = a.remote(b, add, 1, 2)
    assert rref.to_here() == 3
    b.die()
    for call in (
        lambda: a.sync("b", add, 1, 2),
        lambda: a.future("b", add, 1, 2).wait(),
        lambda: a.remote("b", add, 1, 2)._get_future().wait(),
        lambda: a.sync(a, give_back, [rref]),
    ):
        with pytest.raises((WorkerDiedError, RpcError), match=r"'b' is gone|has been deleted"):
            call()


def test_nothing_is_held_for_a_worker_that_is_gone(a, b, c):
    rref = a.remote(b, add, 1, 2)
    own = a.remote(a, add, 1, 2)
    a.sync(c, keep, "rref", [rref, own])
    c.die()
    with pytest.raises(WorkerDiedError):
        a.sync("c", give_back, [rref, own])
    a.remote("c", add, 1, 2)
    del rref, own
    gc.collect()
    assert eventually(lambda: a.is_empty() and b.is_empty())


def test_the_others_go_on_when_one_dies(a, b, c):
    rref = a.remote(b, add, 1, 2)
    c.die()
    assert a.sync(b, add, 1, 2) == rref.to_here() == 3
    assert [m.name for m in a.agent.members.all()] == ["a", "b"]


def test_a_share_whose_parent_dies_does_not_hold_up_the_end(a, b, c):
    kept["rref"] = None
    rref = a.remote(b, add, 1, 2)
    a.sync(c, keep, "rref", rref)
    a.die()
    assert kept["rref"].to_here() == 3
    kept.clear()
    gc.collect()
    assert c.agent.rrefs.delete_all(WAIT)
    assert eventually(lambda: b.is_empty() and c.is_empty())


# Coming and leaving


def test_a_leaving_worker_is_gone_before_shutdown_returns(a, b):
    b.agent.shutdown()
    assert [m.name for m in a.agent.members.all()] == ["a"]
    with pytest.raises(WorkerDiedError, match="it has left the group"):
        a.sync("b", add, 1, 2)


def test_a_reply_that_has_arrived_outlives_its_sender(a, b, monkeypatch):
    tasks: list[Any] = []
    monkeypatch.setattr(a.agent.caller, "threads", SimpleNamespace(submit=tasks.append))
    future = a.future(b, add, 1, 2)
    assert eventually(lambda: tasks)
    b.agent.shutdown()
    for task in tasks:
        task()
    assert future.wait() == 3


def test_a_name_can_be_taken_again(a, b, start):
    b.agent.shutdown()
    again = start("b")
    assert again.agent.info.id == 1
    assert a.sync("b", add, 1, 2) == again.sync("a", add, 1, 2) == 3
    rref = a.remote("b", add, 1, 2)
    assert rref.to_here() == 3
    del rref
    gc.collect()
    assert eventually(lambda: a.is_empty() and again.is_empty())


def test_a_late_change_of_an_earlier_holder_of_an_id_does_not_affect_the_present_one(a, b, start):
    a.directory.close()  # from now on it gets no changes by itself
    b.agent.shutdown()
    c = start("c")
    assert c.agent.info.id == b.agent.info.id
    a.agent._directory = c.directory  # only to look up who is there
    a.sync("c", keep, "rref", a.remote(a, add, 1, 2))
    a.agent._apply([Change(3, "left", b.member), Change(4, "joined", c.member)])
    assert kept["rref"].to_here() == 3


def test_a_joining_worker_can_be_called_at_once(a, start):
    for name in ("x", "y", "z"):
        start(name)
        assert a.sync(name, add, 1, 2) == 3


def test_shutdown_ends_calls_under_way_and_may_be_called_twice(a, b):
    future = a.future(b, later, "never")
    assert event("begun").wait(WAIT)
    a.agent.shutdown()
    a.agent.shutdown()
    with pytest.raises(CallError, match="shut down on this worker"):
        future.wait()


def test_leaks_are_found_also_by_the_last_worker_that_looks(a, b, c):
    of_b, of_c = b.remote(c, add, 1, 2), c.remote(b, add, 1, 2)
    assert of_b.to_here() == of_c.to_here() == 3
    of_gone = a.remote(c, add, 1, 2)
    assert of_gone.to_here() == 3
    del of_gone
    assert eventually(a.is_empty)
    workers = (a, b, c)
    threads = [threading.Thread(target=w.agent.join, kwargs={"timeout": WAIT}) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    c.agent.shutdown()  # releases its RRef, and loses that of b
    assert eventually(lambda: not b.table.owned and not b.table.used)
    leaks = r"(?s)Leaking RRef .* with 1 forks, made by add\n.*with fork Id .*, made at .*\d\n"
    with pytest.raises(RpcError, match=leaks):
        b.agent.rrefs.check_leaks()
    a.agent.rrefs.check_leaks()


def test_an_rref_of_a_worker_that_left_long_ago_is_no_leak(a, b):
    rref = a.remote(b, add, 1, 2)
    assert rref.to_here() == 3
    b.agent.shutdown()
    assert eventually(a.is_empty)
    a.agent.join(timeout=WAIT)
    a.agent.rrefs.check_leaks()


def test_a_static_group_is_whole_when_init_returns():
    hub = MemoryHub()
    workers = {}
    threads = [
        threading.Thread(target=lambda r=r: workers.update({r: MemoryWorker(hub, f"w{r}", r, 3)}))
        for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [m.name for m in workers[2].agent.members.all()] == ["w0", "w1", "w2"]
    assert workers[2].agent.members.is_static
    assert workers[2].sync("w0", add, 1, 2) == 3
    for worker in workers.values():
        worker.agent.shutdown()


def test_a_static_group_that_stays_incomplete_names_the_missing_ranks():
    request = Member("t", "w1", 1, 3)
    with pytest.raises(GroupError, match=r"world_size 3, ranks \[0, 2\] are missing"):
        MemoryDirectory(MemoryHub(), "key").join(request, 0.05)


def test_a_refused_join_says_why(a, start):
    with pytest.raises(GroupError, match="RPC worker name a is not unique"):
        start("a")
