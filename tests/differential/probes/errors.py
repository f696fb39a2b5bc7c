"""Types and texts of the errors that remote functions raise, and of arguments that cannot go."""

from __future__ import annotations

import threading
from typing import Any

import torch
from probe import probe
from torch.distributed import rpc

PEER = "worker1"


class Custom(Exception):
    """An error of a program's own."""


class TwoArguments(Exception):
    """An error that cannot be made from one string."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


KINDS = {
    each.__name__: each
    for each in (
        ArithmeticError,
        AssertionError,
        AttributeError,
        BufferError,
        EOFError,
        FileNotFoundError,
        ImportError,
        IndexError,
        KeyError,
        LookupError,
        MemoryError,
        NotImplementedError,
        OSError,
        OverflowError,
        PermissionError,
        RecursionError,
        RuntimeError,
        StopIteration,
        TimeoutError,
        TypeError,
        UnicodeError,
        ValueError,
        ZeroDivisionError,
        Custom,
    )
}


def fail(kind: type[Exception]) -> None:
    raise kind("expected error")


def fail_in_two() -> None:
    raise TwoArguments(5, "expected error")


@rpc.functions.async_execution
def fail_later(kind: type[Exception]) -> torch.futures.Future[None]:
    future: Any = torch.futures.Future()
    future.set_exception(kind("expected error"))
    return future


@rpc.functions.async_execution
def fail_in_callback(kind: type[Exception]) -> torch.futures.Future[None]:
    return rpc.rpc_async(PEER, torch.add, (1, 1)).then(lambda _: fail(kind))


@probe("expected error", cases=KINDS)
def rpc_sync(kind):
    return rpc.rpc_sync(PEER, fail, (kind,))


@probe("expected error", cases=KINDS)
def rpc_sync_to_self(kind):
    return rpc.rpc_sync("worker0", fail, (kind,))


@probe("expected error", cases=KINDS)
def rpc_async(kind):
    return rpc.rpc_async(PEER, fail, (kind,)).wait()


@probe("expected error", cases=KINDS)
def remote(kind):
    return rpc.remote(PEER, fail, (kind,)).to_here()


@probe("expected error", cases=KINDS)
def async_execution(kind):
    return rpc.rpc_sync(PEER, fail_later, (kind,))


@probe("expected error", cases=KINDS)
def async_callback(kind):
    return rpc.rpc_sync(PEER, fail_in_callback, (kind,))


@probe("expected error", cases=KINDS)
def future_value(kind):
    return rpc.rpc_async(PEER, fail, (kind,)).then(lambda done: done.value()).wait()


@probe("expected error", cases=KINDS)
def wait_all(kind):
    return torch.futures.wait_all([rpc.rpc_async(PEER, fail, (kind,))])


@probe("expected error")
def two_arguments():
    return rpc.rpc_sync(PEER, fail_in_two)


@probe("expected error")
def two_arguments_to_here():
    return rpc.remote(PEER, fail_in_two).to_here()


UNPICKLABLE = {"lock": threading.Lock(), "generator": (i for i in range(2))}


@probe("pickle", cases=UNPICKLABLE)
def unpicklable_argument(value):
    return rpc.rpc_sync(PEER, str, (value,))


@probe("pickle", cases=UNPICKLABLE)
def unpicklable_argument_of_remote(value):
    return rpc.remote(PEER, str, (value,)).to_here()


@probe("pickle", cases=UNPICKLABLE)
def unpicklable_argument_to_self(value):
    return bool(rpc.rpc_sync("worker0", str, (value,)))


@probe("pickle")
def unpicklable_result():
    return rpc.rpc_sync(PEER, threading.Lock)


@probe("expected at most", "expected", "argument")
def too_many_arguments_of_an_operator():
    return rpc.rpc_sync(PEER, torch.add, (torch.ones(1), torch.ones(1), torch.ones(1), 4, 5))


@probe("argument", "unknown", "schema")
def unknown_keyword_of_an_operator():
    return rpc.rpc_async(PEER, torch.add, (torch.ones(1), 1), {"nothing": 1})


@probe()
def wrong_shapes_in_an_operator():
    return rpc.rpc_sync(PEER, torch.add, (torch.ones(2), torch.ones(3)))


@probe("unknown destination worker", "unknown", cases={"name": "nobody", "rank": 7, "float": 1.5})
def unknown_worker(to):
    return rpc.rpc_sync(to, torch.add, (1, 1))


@torch.jit.script
def scripted_failure(value: torch.Tensor) -> torch.Tensor:
    raise ValueError("expected error")


@probe("expected error")
def scripted():
    return rpc.rpc_sync(PEER, scripted_failure, (torch.ones(1),))


@probe("expected error")
def scripted_to_here():
    return rpc.remote(PEER, scripted_failure, (torch.ones(1),)).to_here()


@probe()
def scripted_with_a_wrong_argument():
    return rpc.rpc_sync(PEER, scripted_failure, ("text",))


@probe()
def not_callable():
    return rpc.rpc_sync(PEER, 5)


@probe(cases={"string": "ab", "int": 5, "tensor": torch.ones(2), "list": [1, 2]})
def args_of_another_type(args):
    return rpc.rpc_sync(PEER, torch.add, args)


@probe(cases={"list": [1], "string": "ab", "int keys": {1: 2}})
def kwargs_of_another_type(kwargs):
    return rpc.rpc_sync(PEER, dict, (), kwargs)
