"""Dynamic parallelism over the cluster: ``fork`` and ``wait`` of ``torch.jit``, and ``Await``.

    futures = [rayrpc.jit.fork(model, x) for model in models]
    results = [rayrpc.jit.wait(future) for future in futures]

Outside of TorchScript, torch runs a task of ``fork`` in place; here it runs on a worker.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.futures import Future

from rayrpc import api
from rayrpc._concurrency.reader import release_reader
from rayrpc._jit.tasks import start_task
from rayrpc._runtime.awaitable import Await, awaitable, awaitable_nowait, awaitable_wait
from rayrpc._runtime.invocation import Invocation, To
from rayrpc._runtime.rrefs.lazy import LazyRemote
from rayrpc.options import UNSET_RPC_TIMEOUT
from rayrpc.rref_proxy import RRef

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

P = ParamSpec("P")
T = TypeVar("T")

_jit: Any = torch.jit
_torch_wait = _jit.wait
_torch_script = _jit.script


def lazy(
    to: To,
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

    Source: rayrpc's own; ``rpc.remote`` and ``Await``.
    """
    rref: RRef[T] = api.remote(to, func, args, kwargs, timeout)
    return LazyRemote(rref, timeout)


def fork(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Start a task on a worker.

    Workers are the members of the group that ``fork`` started, called "fork-0" and so on; without
    a group, the first task starts them, one for each CPU of the cluster.  In a group of fixed
    size, its other members run tasks.

    The worker uses this thread's grad mode, and gradients flow back through the result, in a
    context of distributed autograd and outside of one.  A module is sent to a worker once, and
    again after it was changed; what it changes in itself (running statistics) stays there.

    Args:
        func (Callable): a function, a method, a module, or a scripted one.
        args, kwargs: for it; the task waits for Futures among them.

    Returns:
        ``torch.futures.Future`` of its result, or error.  It has no timeout.

    Raises:
        SerializationError: the task cannot be sent.
        RuntimeError: no workers can be started.

    Source: ``torch.jit.fork``.
    """
    future: Future[T] = start_task(Invocation(func, args, kwargs), _start_workers)
    return future


def _start_workers(prefix: str) -> None:
    from rayrpc.launch.task_workers import start_task_workers  # it imports ray

    start_task_workers(prefix)


def wait(future: Future[T]) -> T:
    """Wait for a task, without limit.

    Args:
        future (torch.futures.Future): from ``fork``, or from ``torch.jit.fork``.

    Returns:
        The task's result.

    Raises:
        Exception: the task raised it.
        WorkerDiedError: its worker died.

    Source: ``torch.jit.wait``.
    """
    release_reader()
    result: T = future.wait() if isinstance(future, Future) else _torch_wait(future)
    return result


def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a function or module by ``torch.jit.script``, unless it forks.

    Compiled code forks into threads of its own process.  A function or module whose code calls
    ``fork`` is not compiled, so that its tasks run on the cluster.

    Args:
        obj: a function, module or class.
        args, kwargs: for ``torch.jit.script``.

    Returns:
        ``obj`` if it forks, else what ``torch.jit.script`` returns.

    Raises:
        RuntimeError: it cannot be compiled.

    Source: ``torch.jit.script``.
    """
    return obj if _forks(obj) else _torch_script(obj, *args, **kwargs)


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
