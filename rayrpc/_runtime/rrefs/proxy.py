"""Proxies: methods of a value, called at its owner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.futures import Future

from rayrpc._concurrency.latency_profile import profiled_by_name
from rayrpc._concurrency.outcome import Error, attempt, complete
from rayrpc._runtime.invocation import forwards
from rayrpc._runtime.rrefs.reference import Reference
from rayrpc.functions import async_execution
from rayrpc.options import UNSET_RPC_TIMEOUT

__all__ = ["RRefProxy"]

R = TypeVar("R")


class RRefProxy(Generic[R]):
    """Call methods of a value at its owner.

    ``proxy.method(*args, **kwargs)`` calls ``method`` of the value by ``rpc_api``.

    Args:
        rref (RRef): references the value.
        rpc_api (Callable): ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout (float): of each call in seconds; 0: none; not given: the default.

    Source: ``torch.distributed.rpc.rref_proxy.RRefProxy``.
    """

    def __init__(
        self, rref: Reference[Any], rpc_api: Callable[..., R], timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., R]:
        return functools.partial(_call_method, self, func_name)

    def __reduce__(self) -> Any:
        return RRefProxy, (self.rref, self.rpc_api, self.rpc_timeout)


def _call_method(proxy: RRefProxy[Any], func_name: str, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    rref, rpc_api, timeout = proxy.rref, proxy.rpc_api, proxy.rpc_timeout

    def call(kind: type) -> Any:
        __tracebackhide__ = True
        target = _target(kind, func_name)
        return rpc_api(rref.owner(), target, args=(rref, func_name, args, kwargs), timeout=timeout)

    if rpc_api is not rref._get_api().rpc_async:
        return call(rref._get_type(timeout=timeout))
    kind = rref._get_type(timeout=timeout, blocking=False)
    if kind.done():
        try:
            return call(kind.value())
        except Exception as exc:
            failed: Any = Future()
            complete(failed, Error(exc))
            return failed
    return _call_when_type_is_known(call, kind)


def _call_when_type_is_known(call: Callable[[type], Any], kind: Any) -> Any:
    """Return a Future of a call that is made when the Future ``kind`` is done."""
    result: Any = Future()

    def on_result(done: Any) -> None:
        complete(result, attempt(done.value))

    def on_type(done: Any) -> None:
        try:
            call(done.value()).add_done_callback(on_result)
        except Exception as exc:
            complete(result, Error(exc))

    kind.add_done_callback(on_type)
    return result


def _target(kind: type, func_name: str) -> Callable[..., Any]:
    """Return the function to run at the owner of a value of this type."""
    # only the method itself shows whether it returns a Future; scripted ones never do
    is_scripted = issubclass(kind, torch.jit.ScriptModule)
    if not is_scripted and hasattr(getattr(kind, func_name), "_wrapped_async_rpc_function"):
        return _local_invoke_async_execution
    return _local_invoke


@forwards
@profiled_by_name
def _local_invoke(rref: Reference[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@forwards
@profiled_by_name
@async_execution
def _local_invoke_async_execution(
    rref: Reference[Any], func_name: str, args: Any, kwargs: Any
) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)
