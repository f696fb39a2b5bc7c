"""A typed program: mypy and pyright check that each call has the type that ``assert_type`` says.

It is not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future
from typing_extensions import assert_type

import rayrpc as rpc
from rayrpc import jit


class Counter:
    def add(self, number: int) -> int:
        return number


def double(number: int) -> int:
    return 2 * number


@rpc.functions.async_execution
def double_later(number: int) -> Future[int]:
    return rpc.rpc_async("bob", double, args=(number,))


async def double_soon(number: int) -> int:
    return double(number)


def calls(info: rpc.WorkerInfo) -> None:
    assert_type(rpc.rpc_sync("bob", double, args=(1,)), int)
    assert_type(rpc.rpc_sync(info, double_later, args=(1,)), int)
    assert_type(rpc.rpc_sync(1, double_soon, args=(1,), timeout=5), int)
    assert_type(rpc.rpc_async("bob", double, args=(1,)), Future[int])
    assert_type(rpc.rpc_async("bob", double_later, kwargs={"number": 1}), Future[int])
    assert_type(rpc.rpc_async("bob", double, args=(1,)).wait(), int)
    assert_type(rpc.futures.wait_all([rpc.rpc_async("bob", double, args=(1,))]), list[int])
    for done in rpc.as_completed([rpc.rpc_async("bob", double, args=(1,))], timeout=5):
        assert_type(done, Future[int])


def rrefs() -> None:
    rref = rpc.remote("bob", Counter)
    assert_type(rref, rpc.RRef[Counter])
    assert_type(rref.to_here(), Counter)
    assert_type(rref.local_value(), Counter)
    assert_type(rref.owner(), rpc.WorkerInfo)
    assert_type(rpc.RRef(1), rpc.RRef[int])
    assert_type(rpc.remote("bob", double_later, args=(1,)).to_here(timeout=1), int)
    assert_type(rref.rpc_async().add(1), Future[Any])
    assert_type(rref.remote().add(1), rpc.RRef[Any])


def lazily() -> None:
    assert_type(rpc.lazy("bob", double, args=(1,)).wait(), int)
    assert_type(jit.awaitable(double, 1), jit.Await[int])
    assert_type(jit.awaitable(double, 1).wait(), int)
    assert_type(rpc.remote("bob", double, args=(1,)).lazy().wait(), int)
    lazy = rpc.lazy("bob", double, args=(1,))
    assert_type(lazy + 1, Any)
    assert_type(2**lazy, Any)
    assert_type(-lazy, Any)
    assert_type(lazy[0], Any)
    assert_type(list(lazy), list[Any])
    assert_type(len(lazy) + int(lazy), int)
    assert lazy == 2


def tasks() -> None:
    assert_type(jit.fork(double, 1), Future[int])
    assert_type(jit.wait(jit.fork(double, 1)), int)


def group() -> None:
    rpc.init_rpc("alice", rank=0, world_size=2)
    assert_type(rpc.get_worker_info("bob").id, int)
    assert_type(rpc.get_rpc_timeout(), float)
    rpc.shutdown()


def mistakes() -> None:
    rpc.rpc_sync(None, double)  # type: ignore[call-overload]  # pyright: ignore
    rpc.rpc_sync("bob", 3)  # type: ignore[call-overload]  # pyright: ignore
    jit.fork(double, "no number")  # type: ignore[arg-type]  # pyright: ignore
    torch.futures.wait_all(3)  # type: ignore[arg-type]  # pyright: ignore
