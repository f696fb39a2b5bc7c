"""Dynamic parallelism over the cluster: ``fork`` and ``wait`` of ``torch.jit``, and ``Await``.

    futures = [rayrpc.jit.fork(model, x) for model in models]
    results = [rayrpc.jit.wait(future) for future in futures]

Torch runs a task of ``fork`` in place, outside of TorchScript; here it runs on a worker.  See
``forking.py`` for how modules and gradients travel, ``awaits.py`` for ``Await``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.futures import Future

from rayrpc import api
from rayrpc._jit.awaitable import Await, awaitable, awaitable_nowait, awaitable_wait
from rayrpc._jit.lazy import LazyRemote
from rayrpc._jit.tasks import start
from rayrpc.options import UNSET_RPC_TIMEOUT
from rayrpc.rref import RRef

__all__ = [
    "Await",
    "Future",
    "LazyRemote",
    "awaitable",
    "awaitable_nowait",
    "awaitable_wait",
    "fork",
    "lazy",
    "script",
    "wait",
]

T = TypeVar("T")

_jit: Any = torch.jit
_torchs_wait = _jit.wait
_torchs_script = _jit.script


def lazy(
    to: api.To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> LazyRemote[T]:
    """Run a function on a worker, and return an ``Await`` of its result.

    The function starts at once.  Its result stays at the worker until it is first used, and is
    sent to other workers as a reference.

    Args:
        to, func, args, kwargs: as for ``rpc_sync``.
        timeout (float): of the function, and of the fetch of its result, in seconds; 0: none; not
            given: the default.

    Returns:
        ``LazyRemote``: errors of the call are raised where it is used.

    Raises:
        SerializationError: an argument cannot be sent.
    """
    rref: RRef[T] = api.remote(to, func, args, kwargs, timeout)
    return LazyRemote(rref, timeout)


def fork(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a task on a worker, and return a Future of its result.

    Workers are the members of the group that ``fork`` started, called "fork-0" and so on; without
    a group, they are started with the first task, one for each CPU of the cluster.  In a group of
    fixed size, its other members run tasks.

    Grad mode travels along, and gradients come back, in a context of distributed autograd and
    outside of one.  A module is sent to a worker once, and again after it was changed; what it
    changes in itself (running statistics) stays there.

    Args:
        func (Callable): a function, a method, a module, or a scripted one.
        args, kwargs: for it; Futures among them are waited for by the task.

    Returns:
        ``torch.futures.Future``; ``wait`` raises what the task raised.

    Source: ``torch.jit.fork``.
    """
    return start(func, args, kwargs)


def wait(future: Any) -> Any:
    """Wait for a task, and return its result.

    Args:
        future (torch.futures.Future): from ``fork``.

    Raises:
        Exception: the task raised it.

    Source: ``torch.jit.wait``.
    """
    return future.wait() if isinstance(future, Future) else _torchs_wait(future)


def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a function or module by ``torch.jit.script``, unless it forks.

    Compiled code forks into threads of its own process; what calls ``fork`` stays in Python, so
    that its tasks run on the cluster.

    Args:
        obj: a function, module or class.
        args, kwargs: for ``torch.jit.script``.
    """
    return obj if _forks(obj) else _torchs_script(obj, *args, **kwargs)


def _forks(obj: Any) -> bool:
    return any("fork" in _names(function.__code__) for function in _functions(obj))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # comprehensions are code of their own
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _functions(obj: Any) -> Iterator[types.FunctionType]:
    if isinstance(obj, types.FunctionType):
        yield obj
    elif isinstance(obj, torch.nn.Module) and not isinstance(obj, _jit.ScriptModule):
        for cls in {type(module) for module in obj.modules()}:
            for base in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]:
                yield from filter(lambda f: isinstance(f, types.FunctionType), vars(base).values())
