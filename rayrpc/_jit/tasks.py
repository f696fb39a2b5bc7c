"""Tasks on workers: which worker runs one, how a module gets there, how gradients come back.

    caller:  start_task ──> worker chosen ──> _pack ──> (call) ──> worker:  _run ──> _reply
    caller:  _unpack, the user's Future <── (reply) <──

The worker keeps a copy of a task's module, which the caller references by an RRef and sends again
when the module was changed since.  If a task's tensors or modules require grad, the worker keeps
the task's graph, and at the caller its results are outputs of one node of the local graph.  That
node's backward is a call of the worker, so that gradients reach the caller's leaves in any pass.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.futures import Future, collect_all
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from rayrpc._autograd.current_context import call_without_context, start_without_context
from rayrpc._concurrency.outcome import Error, Outcome, attempt, complete
from rayrpc._concurrency.reader import release_reader
from rayrpc._jit.module_copies import ModuleCopies
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc.functions import async_execution
from rayrpc.rref_proxy import RRef

__all__ = ["start_task"]

StartWorkers = Callable[[str], None]

WORKER_PREFIX = "fork-"  # of the names of workers that serve only tasks

_Module: Any = torch.nn.Module


@dataclass(frozen=True)
class _ModuleCopy:
    """A worker's copy of a module, or a method of it; the empty name: the module itself."""

    rref: RRef[Any]
    method: str = ""


@dataclass(frozen=True)
class _DoneFuture:
    """A Future that is done, as it is sent."""

    outcome: Outcome[Any]

    def future(self) -> Any:
        """Return a Future with this outcome."""
        made: Any = Future()
        complete(made, self.outcome)
        return made


class _Task(NamedTuple):
    """A task as it is sent.

    Args:
        func, args, kwargs: modules, Futures and tensors that require grad are replaced.
        grad (bool): grad mode is on.
        inputs (list): the tensors that ``_TensorSlot`` replaces, without their graph.
        modules (list[_ModuleCopy]): those that the task names.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    inputs: list[torch.Tensor]
    modules: list[_ModuleCopy]


@dataclass(frozen=True)
class _TensorSlot:
    """Replaces a tensor that requires grad, by its position among a task's inputs or results."""

    number: int


# -- the caller ---------------------------------------------------------------------------------


class _Workers:
    """The workers that run this process's tasks, and how many each runs now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few instructions: replies need it, too
        self._starting = threading.Lock()
        self._tasks: dict[str, int] = {}
        self._rotation = itertools.count()  # of the workers with equally few

    def acquire(self, start_workers: StartWorkers) -> str:
        """Return the worker with the fewest of our tasks, and count one more until ``release``.

        Args:
            start_workers: called if there are no workers for tasks.
        """
        names = self._members()
        if not names:
            release_reader()
            with self._starting:
                names = self._members()
                if not names:
                    start_workers(WORKER_PREFIX)
                    names = self._members()
        with self._lock:
            first = next(self._rotation) % len(names)
            name = min(names[first:] + names[:first], key=lambda name: self._tasks.get(name, 0))
            self._tasks[name] = self._tasks.get(name, 0) + 1
            return name

    def release(self, name: str) -> None:
        """Count one task less at a worker."""
        with self._lock:
            self._tasks[name] -= 1

    def _members(self) -> list[str]:
        """Return the workers for tasks; in a group of fixed size, which none can join, all."""
        if not current.is_set():
            return []
        agent = current.get_agent()
        names = [info.name for info in agent.get_worker_infos()]
        if any(name.startswith(WORKER_PREFIX) for name in names):
            names = [name for name in names if name.startswith(WORKER_PREFIX)]
        elif not agent.members.is_static:
            return []
        others = [name for name in names if name != agent.info.name]
        return sorted(others) or names


_workers = _Workers()
_copies = ModuleCopies()


def start_task(invocation: Invocation, start_workers: StartWorkers) -> Future[Any]:
    """Start a task once the Futures among its arguments are done; see ``rayrpc.jit.fork``.

    Args:
        invocation: the function and its arguments.
        start_workers: starts workers for tasks, whose names begin with the given prefix, if there
            are none.

    Returns:
        A Future of the task's result.
    """
    result: Future[Any] = Future()
    arguments = (invocation.args, invocation.kwargs)
    waits = [each for each in tree_leaves(arguments) if isinstance(each, Future)]
    grad = torch.is_grad_enabled()
    if not waits:
        _send(invocation, grad, result, start_workers)
        return result

    def send_now(_: Any) -> None:
        try:
            _send(invocation, grad, result, start_workers)
        except Exception as exc:
            complete(result, Error(exc))

    all_of: Any = collect_all(waits)
    all_of.add_done_callback(send_now)
    return result


def _send(
    invocation: Invocation, grad: bool, result: Future[Any], start_workers: StartWorkers
) -> None:
    """Send a task to a worker; ``result`` completes with the reply."""
    worker = _workers.acquire(start_workers)
    try:
        task, leaves = _pack(invocation, grad, worker)
        agent = current.get_agent()
        worker_id = agent.lookup(worker).id
        future = call_without_context(agent, worker_id, _run, (task,), None)
    except BaseException:
        _workers.release(worker)
        raise

    def on_reply(done: Any) -> None:
        _workers.release(worker)
        complete(result, attempt(lambda: _unpack(done.value(), leaves)))

    future.add_done_callback(on_reply)


def _pack(invocation: Invocation, grad: bool, worker: str) -> tuple[_Task, list[torch.Tensor]]:
    """Return a task for a worker, and the tensors here that gradients of its result go to."""
    func: Any = invocation.func
    inputs: list[torch.Tensor] = []
    modules: dict[Any, _ModuleCopy] = {}

    def copy_of(module: Any) -> _ModuleCopy:
        if module not in modules:
            modules[module] = _ModuleCopy(_copies.at(worker, module))
        return modules[module]

    def pack(value: Any) -> Any:
        if isinstance(value, _Module):
            return copy_of(value)
        if isinstance(value, Future):
            return _DoneFuture(attempt(value.wait))
        if isinstance(value, torch.Tensor) and value.requires_grad:
            inputs.append(value)
            return _TensorSlot(len(inputs) - 1)
        return value

    owner = getattr(func, "__self__", None)
    if isinstance(owner, _Module) and hasattr(type(owner), func.__name__):
        func = _ModuleCopy(copy_of(owner).rref, func.__name__)
    else:
        func = pack(func)
    args, kwargs = tree_map(pack, (invocation.args, invocation.kwargs))
    parameters = [
        parameter
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    bare = [each.detach() for each in inputs]
    task = _Task(func, args, kwargs, grad, bare, list(modules.values()))
    return task, [*inputs, *parameters] if grad else []


def _unpack(reply: Any, leaves: list[torch.Tensor]) -> Any:
    """Return a task's result; tensors that require grad are outputs of a node here."""
    value, tensors, graph = reply
    if tensors:
        with torch.enable_grad():
            tensors = _task_function.apply(graph, tensors, *leaves)

    def unpack(each: Any) -> Any:
        if isinstance(each, _TensorSlot):
            return tensors[each.number]
        return each.future() if isinstance(each, _DoneFuture) else each

    return tree_map(unpack, value)


class _TaskFunction(torch.autograd.Function):
    """A task as a node of the local graph."""

    @staticmethod
    def forward(ctx: Any, graph: Any, results: list[torch.Tensor], *leaves: torch.Tensor) -> Any:
        ctx.graph = graph
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        args = (ctx.graph, gradients)
        agent, owner = current.get_agent(), ctx.graph.owner().id
        return None, None, *start_without_context(agent, owner, _backward, args, None)()


_task_function: Any = _TaskFunction


# -- the worker ---------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """The ends of a task's graph."""

    results: list[torch.Tensor]
    leaves: list[torch.Tensor]


@async_execution
def _run(task: _Task) -> Future[Any]:
    """Run a task; return a Future of the reply."""
    inputs = [each.requires_grad_() for each in task.inputs]

    def unpack(value: Any) -> Any:
        if isinstance(value, _TensorSlot):
            return inputs[value.number]
        if isinstance(value, _ModuleCopy):
            module = value.rref.local_value()
            return getattr(module, value.method) if value.method else module
        return value.future() if isinstance(value, _DoneFuture) else value

    func, args, kwargs = tree_map(unpack, (task.func, task.args, task.kwargs))
    with torch.set_grad_enabled(task.grad):
        value = func(*args, **kwargs)
    leaves = [*inputs, *_parameters(task.modules)] if task.grad else []
    return _reply(value, leaves)


def _parameters(copies: list[_ModuleCopy]) -> list[torch.Tensor]:
    return [p for copy in copies for p in copy.rref.local_value().parameters() if p.requires_grad]


def _reply(value: Any, leaves: list[torch.Tensor]) -> Future[Any]:
    """Return a Future of the reply, which completes once the Futures in the value are done.

    Args:
        value: the task's result.
        leaves: the tensors of the task that require grad.

    Returns:
        Of the value with its Futures and tensors that require grad replaced, those tensors
        without their graph, and an RRef of the graph; None if there is no graph.
    """
    waits: list[Any] = []
    results: list[torch.Tensor] = []

    def pack(each: Any) -> Any:
        if isinstance(each, Future):
            waits.append(each)
        elif isinstance(each, torch.Tensor) and each.requires_grad:
            if not leaves:
                return each.detach()
            results.append(each)
            return _TensorSlot(len(results) - 1)
        return each

    packed = tree_map(pack, value)
    graph = RRef(_Graph(results, leaves)) if results else None
    reply: Future[Any] = Future()

    def send(_: Any = None) -> None:
        done = tree_map_only(Future, lambda future: _DoneFuture(attempt(future.wait)), packed)
        reply.set_result((done, [result.detach() for result in results], graph))

    if waits:
        all_of: Any = collect_all(waits)
        all_of.add_done_callback(send)
    else:
        send()
    return reply


def _backward(rref: RRef[_Graph], gradients: Any) -> Any:
    """Return the gradients of a graph's leaves, None for a leaf that was not used."""
    results, leaves = rref.local_value()
    ends = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
    if not ends:
        return [None] * len(leaves)
    return torch.autograd.grad(
        [result for result, _ in ends],
        leaves,
        [gradient for _, gradient in ends],
        retain_graph=True,  # the graph lives as long as its RRef
        allow_unused=True,
    )
