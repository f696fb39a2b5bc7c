"""asyncio: Futures in ``await``, async functions as targets of calls."""

# torch's stubs know no ``await`` of a Future: rayrpc adds it
# mypy: disable-error-code="misc,call-overload"

import asyncio
import os
import signal
import threading
from typing import Any, cast

import pytest
import targets
import torch
from conftest import eventually

import rayrpc as rpc
from rayrpc import autograd, errors
from rayrpc._runtime.coroutines import Coroutines
from rayrpc.functions import async_execution
from rayrpc.futures import Future, as_completed, collect_all, extend_futures

WAIT = 60.0

rpc_async: Any = rpc.rpc_async  # its Futures can be awaited, which torch's types do not say


def within(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, WAIT)

    return asyncio.run(limited())


# -- what workers run ---------------------------------------------------------------------------


async def double(x):
    await asyncio.sleep(0)
    return x * 2


async def fail(text):
    await asyncio.sleep(0)
    raise ValueError(text)


async def nap(seconds):
    await asyncio.sleep(seconds)


_arrived: list[asyncio.Event] = []


async def meet(number):
    """Return this thread's id once ``number`` calls are here."""
    here = asyncio.Event()
    _arrived.append(here)
    if len(_arrived) == number:
        for each in _arrived:
            each.set()
        _arrived.clear()
    await here.wait()
    return threading.get_ident()


async def ask(to, func, *args):
    return await rpc_async(to, func, args=args)


async def ask_blocking(to, func, *args):
    return rpc.rpc_sync(to, func, args=args)


async def ask_waiting(to, func, *args):
    return rpc.rpc_async(to, func, args=args).wait()


def back_to(to, func, *args):
    return rpc.rpc_sync(to, func, args=args)


@async_execution
async def later(x):
    await asyncio.sleep(0)
    future = Future()
    threading.Timer(0.01, future.set_result, [x + 1]).start()
    return future


async def two_steps(x, w, to):
    y = await rpc_async(to, targets.step, args=(x, w))
    await asyncio.sleep(0.01)
    return await rpc_async(to, targets.step, args=(y, w))


class Gate:
    def __init__(self):
        self.opened = asyncio.Event()

    async def open(self):
        self.opened.set()

    async def enter(self):
        await self.opened.wait()
        return "in"


# -- futures in await ---------------------------------------------------------------------------


class TestAwait:
    @pytest.fixture(autouse=True)
    def extended(self):
        extend_futures()  # as the first agent does

    def test_a_future_gives_its_value(self, workers):
        async def main():
            return await rpc_async("alice", torch.add, args=(torch.ones(2), 1))

        assert torch.equal(within(main()), torch.full((2,), 2.0))

    def test_a_future_raises_its_error(self, workers):
        async def main():
            await rpc_async("alice", targets.fail)

        with pytest.raises(ValueError):
            within(main())

    def test_many_are_gathered(self, workers):
        async def main():
            calls = [rpc_async("alice", targets.identity, args=(n,)) for n in range(100)]
            return await asyncio.gather(*calls)

        assert within(main()) == list(range(100))

    def test_what_torch_makes_of_futures_can_be_awaited_too(self, workers):
        async def main():
            future = rpc_async("alice", targets.identity, args=(1,))
            chained = await future.then(lambda done: done.wait() + 1)
            collected: Any = collect_all([future])
            (one,) = await collected
            return chained, await one

        assert within(main()) == (2, 1)

    def test_the_loop_runs_on_meanwhile(self):
        future: Any = Future()

        async def main():
            asyncio.get_running_loop().call_later(0.01, future.set_result, "late")
            return await future

        assert within(main()) == "late"

    def test_a_waiter_that_is_cancelled_leaves_the_future_alone(self):
        future: Any = Future()

        async def main():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_awaited(future), 0.01)
            asyncio.get_running_loop().call_later(0.01, future.set_result, 1)
            return await future

        assert within(main()) == 1

    def test_a_future_may_end_after_the_loop(self):
        future = Future()

        async def main():
            task = asyncio.ensure_future(_awaited(future))
            await asyncio.sleep(0)
            task.cancel()

        within(main())
        future.set_result(1)
        assert future.wait() == 1


async def _awaited(future):
    return await future


class TestAsCompleted:
    def futures(self):
        slow, quick = Future(), Future()
        quick.set_result("quick")
        return slow, quick

    def test_the_first_that_is_done_comes_first(self):
        slow, quick = self.futures()
        seen = []
        for future in as_completed([slow, quick, quick]):
            seen.append(future)
            if future is quick:
                slow.set_result("slow")
        assert seen == [quick, slow]

    def test_with_async_for(self):
        slow, quick = self.futures()

        async def main():
            seen = []
            async for future in rpc.as_completed([slow, quick]):
                seen.append(future)
                if future is quick:
                    threading.Timer(0.01, slow.set_result, ["slow"]).start()
            return seen

        assert within(main()) == [quick, slow]

    @pytest.mark.parametrize("way", ["for", "async for"])
    def test_the_timeout_is_for_all(self, way):
        slow, quick = self.futures()
        seen = []

        async def main():
            async for future in as_completed([slow, quick], timeout=0.05):
                seen.append(future)

        with pytest.raises(TimeoutError, match=r"1 of 2 Futures were not done after 0\.05 s"):
            if way == "for":
                seen.extend(as_completed([slow, quick], timeout=0.05))
            else:
                within(main())
        assert way == "for" or seen == [quick]

    def test_of_nothing_comes_nothing(self):
        assert list(as_completed([])) == []

    def test_of_what_is_no_future_is_an_error(self):
        with pytest.raises(TypeError, match="Future"):
            as_completed([Future(), cast(Any, 5)])


# -- async functions as targets -------------------------------------------------------------------


class TestTargets:
    def test_in_every_way_to_call(self, workers):
        assert rpc.rpc_sync("alice", double, args=(1,)) == 2
        assert rpc.rpc_async("alice", double, args=(2,)).wait() == 4
        rref = rpc.remote("alice", double, args=(3,))
        assert rref.to_here() == 6
        assert rpc.rpc_sync("driver", double, args=(4,)) == 8

    def test_errors_are_those_of_any_function(self, workers):
        with pytest.raises(ValueError, match="of a coroutine"):
            rpc.rpc_sync("alice", fail, args=("of a coroutine",))
        rref = rpc.remote("alice", fail, args=("of a coroutine",))
        with pytest.raises(ValueError, match="of a coroutine"):
            rref.to_here()

    def test_with_async_execution_its_future_is_waited_for(self, workers):
        assert rpc.rpc_sync("alice", later, args=(1,)) == 2

    def test_many_wait_at_once_in_one_thread(self, workers):
        calls = [rpc.rpc_async("alice", meet, args=(200,)) for _ in range(200)]
        assert len({call.wait() for call in calls}) == 1

    def test_methods_share_asyncios_events(self, workers):
        gate = rpc.remote("alice", Gate)
        entered = gate.rpc_async().enter()
        assert not entered.done()
        gate.rpc_sync().open()
        assert entered.wait() == "in"

    def test_they_call_others(self, workers):
        assert rpc.rpc_sync("alice", ask, args=("bob", double, 5)) == 10

    @pytest.mark.parametrize("how", [ask_blocking, ask_waiting])
    def test_a_call_that_blocks_the_loop_does_not_lock_up(self, workers, how):
        args = ("bob", back_to, "alice", double, 7)
        assert rpc.rpc_sync("alice", how, args=args, timeout=WAIT) == 14
        assert rpc.rpc_sync("alice", double, args=(1,), timeout=WAIT) == 2

    def test_gradients_flow_through_their_awaits(self, workers, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", two_steps, args=(x, w, "bob"))
            autograd.backward(context_id, [y.sum()])
            got = autograd.get_gradients(context_id)
        expected = torch.autograd.grad(targets.step(targets.step(x, w), w).sum(), (x, w))
        for leaf, gradient in zip((x, w), expected, strict=True):
            torch.testing.assert_close(got[leaf], gradient)

    def test_one_that_waits_when_its_worker_dies_is_an_error(self, workers):
        rpc.start_workers(["carol"])
        pid = rpc.rpc_sync("carol", os.getpid)
        future = rpc.rpc_async("carol", nap, args=(60,), timeout=0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerDiedError, match="carol"):
            future.wait()


# -- loops ----------------------------------------------------------------------------------------


class TestLoops:
    def test_a_loop_that_is_blocked_gets_no_new_coroutines(self):
        runner = Coroutines("test")
        ends, gate = [], threading.Event()

        async def block():
            gate.wait(WAIT)
            return threading.get_ident()

        async def name():
            return threading.get_ident()

        runner.submit(block(), lambda outcome: ends.append(outcome.unwrap()))
        for _ in range(3):
            runner.submit(name(), lambda outcome: ends.append(outcome.unwrap()))
        assert eventually(lambda: len(ends) == 3)
        gate.set()
        assert eventually(lambda: len(ends) == 4)
        assert len({*ends}) == 2 and ends[3] not in ends[:3]
        runner.close()

    def test_close_cancels_what_runs(self):
        ends, started = [], threading.Event()

        async def forever():
            started.set()
            await asyncio.sleep(60)

        runner = Coroutines("closed")
        runner.submit(forever(), ends.append)
        assert started.wait(WAIT)
        runner.close()
        assert eventually(lambda: ends != [])
        assert eventually(lambda: not [t for t in threading.enumerate() if "closed" in t.name])
        with pytest.raises(RuntimeError, match="cancelled"):
            ends[0].unwrap()
