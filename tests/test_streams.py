"""Streams: what generators of other workers yield, and their ends."""

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from typing import Any

import pytest
import targets
import torch
from conftest import eventually, run_in_threads
from docstrings import run_example

import rayrpc as rpc
from rayrpc import autograd, errors, streams

WAIT = 60.0

GENERATORS = [targets.up_to, targets.up_to_async]


@pytest.fixture(autouse=True)
def clean(workers):
    for name in workers:
        rpc.rpc_sync(name, targets.take_log)


def logged(name="alice"):
    return rpc.rpc_sync(name, targets.take_log)


def owned(name):
    """Return how many RRefs a worker owns."""
    return rpc.rpc_sync(name, targets.count_owned)


def has_closed(name="alice", found=None):
    """Tell whether a generator has ended; add what it has noted to ``found``."""
    noted = rpc.rpc_sync(name, targets.take_log)
    if found is not None:
        found += noted
    return "closed" in noted


def within(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, WAIT)

    return asyncio.run(limited())


async def collect(stream):
    return [value async for value in stream]


@pytest.mark.parametrize("window", [1, 8, 100])
@pytest.mark.parametrize("func", GENERATORS)
def test_all_values_arrive_in_order(func, window):
    values = list(range(30))
    assert list(rpc.stream("alice", func, args=(30,), window=window)) == values
    assert within(collect(rpc.stream("alice", func, args=(30,), window=window))) == values
    assert list(rpc.stream("driver", func, args=(30,), window=window)) == values  # itself


def test_any_iterator_and_the_value_that_a_generator_returns():
    assert list(rpc.stream("alice", iter, args=([3, 4],))) == [3, 4]
    assert list(rpc.stream("alice", lambda: (x for x in "ab"), timeout=WAIT)) == ["a", "b"]

    def returns():
        got = yield 1
        return got, "returned"

    def delegate():
        return (yield from rpc.stream("alice", returns))

    generator = delegate()
    assert next(generator) == 1
    with pytest.raises(StopIteration) as ended:
        next(generator)
    assert ended.value.value == (None, "returned")


@pytest.mark.parametrize("func", GENERATORS)
def test_at_most_the_window_is_under_way(func):
    stream = rpc.stream("alice", func, args=(1000,), window=4)
    made: list[Any] = []
    assert eventually(lambda: made.extend(logged()) or made == [0, 1, 2, 3])
    for got in range(20):
        assert next(stream) == got
        made += logged()
        assert len(made) <= got + 1 + 4
    time.sleep(0.1)
    assert made + logged() == list(range(24))
    stream.close()


@pytest.mark.parametrize("floats", [2, 1 << 18])
@pytest.mark.parametrize("to", ["alice", "driver"])
def test_a_value_is_what_it_was_when_it_was_yielded(to, floats):
    got = [set(x.tolist()) for x in rpc.stream(to, targets.same_tensor, args=(20, floats))]
    assert got == [{float(number)} for number in range(20)]


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("func", GENERATORS)
def test_leaving_the_loop_closes_the_generator(func):
    for value in rpc.stream("alice", func, args=(10**9,)):
        if value == 20:
            break
    found: list[Any] = []
    assert eventually(lambda: has_closed(found=found))
    assert {"GeneratorExit", "CancelledError"} & {*found}
    assert owned("alice") == 0


@pytest.mark.parametrize("func", GENERATORS)
def test_close_returns_when_the_generator_is_closed(func):
    stream = rpc.stream("alice", func, args=(10**9, 0.01))
    assert next(stream) == 0
    stream.close()
    assert has_closed()
    assert list(stream) == [] and stream.has_ended
    stream.close()
    with rpc.stream("alice", func, args=(10**9, 0.01)) as other:
        assert next(other) == 0
    assert has_closed()


def test_close_in_a_coroutine():
    async def run():
        async with rpc.stream("alice", targets.up_to_async, args=(10**9,)) as stream:
            assert await anext(stream) == 0
        assert has_closed()
        assert await collect(stream) == []

    within(run())


def test_an_error_comes_after_the_values_before_it():
    stream = rpc.stream("alice", targets.fail_after, args=(3,))
    got: list[int] = []
    with pytest.raises(LookupError, match="no more"):
        for value in stream:
            got.append(value)
    assert got == [0, 1, 2]
    assert [next(stream, "ended"), next(stream, "ended")] == ["ended", "ended"]
    with pytest.raises(LookupError):
        within(collect(rpc.stream("alice", targets.fail_after, args=(3,))))


def test_errors_before_the_first_value():
    with pytest.raises(TypeError, match="up_to"):
        next(rpc.stream("alice", targets.up_to))
    with pytest.raises(TypeError, match=r"rpc.stream runs generators.*pid has returned .*int"):
        next(rpc.stream("alice", targets.pid))
    with pytest.raises(ValueError, match="window must be"):
        rpc.stream("alice", targets.up_to, args=(1,), window=0)
    with pytest.raises(errors.SerializationError):
        rpc.stream("alice", targets.up_to, args=(threading.Lock(),))


def test_a_value_that_cannot_be_sent():
    def locks():
        yield 1
        yield threading.Lock()

    stream = rpc.stream("alice", locks)
    assert next(stream) == 1
    with pytest.raises(errors.SerializationError):
        next(stream)
    assert list(stream) == []


def test_the_death_of_the_worker_ends_it_after_the_values_that_have_arrived():
    rpc.start_workers(["mortal"])
    got: list[int] = []
    start = time.monotonic()
    with pytest.raises(errors.WorkerDiedError, match="mortal"):
        for value in rpc.stream("mortal", targets.die_after, args=(3,)):
            got.append(value)
    assert got == [0, 1, 2] and time.monotonic() - start < WAIT / 2


def test_the_death_of_the_caller_closes_the_generator():
    def hold(log):
        stream = rpc.stream("alice", targets.up_to, args=(10**9,))
        log.append((next(stream), stream))  # kept: only the death ends it

    rpc.start_workers(["reader"])
    rpc.rpc_sync("reader", hold, args=([],))  # dropped with the call's arguments
    assert eventually(has_closed)

    def keep_and_die():
        stream = rpc.stream("alice", targets.up_to, args=(10**9,))
        next(stream)
        targets.shared["stream"] = stream
        targets.kill_me()

    with pytest.raises(errors.WorkerDiedError):
        rpc.rpc_sync("reader", keep_and_die)
    assert eventually(has_closed)


def test_a_wait_that_times_out_does_not_end_it():
    stream = rpc.stream("alice", targets.up_to, args=(2, 0.4), timeout=0.1)
    with pytest.raises(errors.CallTimeoutError, match="100 ms"):
        next(stream)
    got: list[int] = []
    while len(got) < 2:
        try:
            got.append(next(stream))
        except errors.CallTimeoutError:
            continue
    assert got == [0, 1]

    async def run():
        stream = rpc.stream("alice", targets.up_to, args=(1, 0.4), timeout=0.1)
        with pytest.raises(errors.CallTimeoutError, match="100 ms"):
            await anext(stream)
        while True:
            with contextlib.suppress(errors.CallTimeoutError):
                return await anext(stream)

    assert within(run()) == 0


def test_an_opening_that_takes_longer_than_the_timeout_does_not_end_it():
    def opened_late():
        time.sleep(0.4)
        return iter([1])

    stream = rpc.stream("alice", opened_late, timeout=0.1)
    with pytest.raises(errors.CallTimeoutError, match="100 ms"):
        next(stream)
    got: list[int] = []
    while not got:
        with contextlib.suppress(errors.CallTimeoutError):
            got.append(next(stream))
    assert got == [1]


def test_one_thread_at_a_time():
    stream = rpc.stream("alice", targets.up_to, args=(3, 0.5))
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.append(next(stream)), daemon=True)
    thread.start()
    assert eventually(stream._iterating.locked)
    with pytest.raises(ValueError, match="another thread"):
        next(stream)
    thread.join(WAIT)
    assert first == [0] and next(stream) == 1
    stream.close()


def test_shutdown_ends_the_streams_of_this_worker():
    samplers = rpc.init_group("stream-samplers", "me")
    samplers.start_workers(["sampler"])
    stream = samplers.stream("sampler", targets.up_to, args=(10**9, 0.1), window=1000, timeout=0)
    assert [next(stream), next(stream)] == [0, 1]
    waiting = samplers.stream("sampler", targets.up_to_async, args=(1, WAIT), timeout=0)
    ended: list[Any] = []

    def wait():
        try:
            ended.append(next(waiting))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    samplers.shutdown(timeout=WAIT / 2)
    thread.join(WAIT)
    assert isinstance(ended[0], errors.CallError)
    with pytest.raises(errors.CallError):
        next(stream)


# -- with other things ----------------------------------------------------------------------------


def test_a_stream_holds_no_thread_between_its_values():
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
    samplers = rpc.init_group("stream-slots", "me", rpc_backend_options=options)
    try:
        stream = samplers.stream("me", targets.up_to, args=(100, 0.001), window=2)
        for value in stream:
            assert samplers.rpc_sync("me", max, args=(value, 1), timeout=WAIT) == max(value, 1)
    finally:
        samplers.shutdown()


def test_many_at_once_and_one_through_another():
    made = [
        rpc.stream(("alice", "bob")[number % 2], GENERATORS[number % 2], args=(20,), window=2)
        for number in range(30)
    ]
    assert [list(each) for each in zip(*made, strict=True)] == [[n] * 30 for n in range(20)]
    assert list(rpc.stream("alice", targets.forward, args=("bob", 20))) == list(range(20))


def test_values_may_be_rrefs():
    rrefs = list(rpc.stream("alice", targets.rrefs_to, args=(5,)))
    assert [rref.to_here() for rref in rrefs] == list(range(5))
    assert {rref.owner_name() for rref in rrefs} == {"alice"}
    unread = rpc.stream("alice", targets.rrefs_to, args=(9,))
    next(unread)
    del rrefs, unread
    gc.collect()
    assert eventually(lambda: owned("alice") == 0)


def test_gradients_flow_through_the_values():
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        with autograd.context() as context_id:
            values = list(rpc.stream("alice", targets.scaled, args=(weight, 5), window=2))
            assert len(values) == 5
            autograd.backward(context_id, [torch.stack(values).sum()])
            gradients = autograd.get_gradients(context_id)
            assert gradients[weight].tolist() == [10.0, 10.0]


def test_an_open_stream_runs_on_while_calls_are_made():
    stream = rpc.stream("alice", targets.up_to, args=(10**9,))
    for number in range(200):
        assert next(stream) == number
        assert rpc.rpc_sync("alice", max, args=(number, 1)) == max(number, 1)
    stream.close()


def test_threads_that_open_and_drop_streams(quick_switches):
    def run(func, to):
        for _ in range(15):
            stream = rpc.stream(to, func, args=(10**9,), window=3)
            assert list(itertools.islice(stream, 10)) == list(range(10))

    run_in_threads(run, itertools.product(GENERATORS, ("alice", "bob", "driver")), WAIT)
    agent = rpc._get_current_rpc_agent()
    gc.collect()
    assert eventually(lambda: not agent.caller.active and not agent.callee.active)
    assert eventually(lambda: owned("alice") == owned("bob") == 0)


def test_what_it_tells_of_itself():
    stream = rpc.stream("alice", targets.up_to, args=(2,))
    next(stream)
    assert repr(stream) == "<stream of up_to on alice: open, 1 values so far>"
    assert isinstance(stream, rpc.Stream)
    list(stream)
    assert repr(stream) == "<stream of up_to on alice: ended, 2 values so far>"


def test_the_examples_of_the_docstring_run(workers):
    if "worker1" not in {info.name for info in rpc._get_current_rpc_agent().get_worker_infos()}:
        rpc.start_workers(["worker1"])
    run_example(streams.stream, rpc=rpc)
