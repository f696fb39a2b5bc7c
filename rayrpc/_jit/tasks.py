"""Tasks on workers: which worker, how a module gets there, how gradients come back.

A task's module is kept by the worker, as an RRef for whoever sent it, and sent again when it was
changed since.  If a task's tensors or modules require grad, the worker keeps the task's graph, and
here its result comes out of one node of the local graph, whose backward pass is a call: gradients
reach the leaves that the caller has, whatever pass it runs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.futures import Future, collect_all
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from rayrpc import api
from rayrpc._autograd.hook import call_without_context, start_without_context
from rayrpc._concurrency.outcome import Error, Outcome, attempt, complete
from rayrpc._runtime import current
from rayrpc.functions import async_execution
from rayrpc.rref import RRef

__all__ = ["start"]

PREFIX = "fork-"  # of the names of workers that serve only tasks

_Module: Any = torch.nn.Module


@dataclass(frozen=True)
class _Kept:
    """A module that a worker keeps, or a method of it."""

    rref: RRef[Any]
    method: str = ""


@dataclass(frozen=True)
class _Settled:
    """A Future that is done, on its way."""

    outcome: Outcome[Any]

    def future(self) -> Any:
        """Return a Future like it."""
        made: Any = Future()
        complete(made, self.outcome)
        return made


class _Task(NamedTuple):
    """What a worker is to run.

    Args:
        func, args, kwargs: with modules and Futures replaced.
        grad (bool): is grad mode on.
        inputs (list): tensors of ``args`` and ``kwargs`` that require grad, without their graph.
        modules (list[_Kept]): those whose parameters require grad.
    """

    func: Any
    args: Any
    kwargs: Any
    grad: bool
    inputs: list[torch.Tensor]
    modules: list[_Kept]


@dataclass(frozen=True)
class _Slot:
    """The place of one of a task's inputs."""

    number: int


# -- the caller ---------------------------------------------------------------------------------


class _Workers:
    """The workers that this process gives tasks to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, int] = {}  # under way
        self._turn = itertools.count()

    def take(self) -> str:
        """Return the worker with the fewest of our tasks, to be given back."""
        with self._lock:
            names = self._names()
            first = next(self._turn) % len(names)
            name = min(names[first:] + names[:first], key=lambda name: self._tasks.get(name, 0))
            self._tasks[name] = self._tasks.get(name, 0) + 1
            return name

    def give_back(self, name: str) -> None:
        """Note that a task has ended."""
        with self._lock:
            self._tasks[name] -= 1

    def _names(self) -> list[str]:
        if not (names := self._members()):
            from rayrpc.launch.task_workers import start_forkers

            start_forkers(PREFIX)
            names = self._members()
        return names

    def _members(self) -> list[str]:
        """Return the workers for tasks; of a group of fixed size, which gets no others, all."""
        if not current.is_set():
            return []
        agent = current.get_agent()
        names = [info.name for info in agent.get_worker_infos()]
        if any(name.startswith(PREFIX) for name in names):
            names = [name for name in names if name.startswith(PREFIX)]
        elif not agent.is_static_group:
            return []
        others = [name for name in names if name != agent.info.name]
        return sorted(others) or names


_workers = _Workers()


def start(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Start a task, and return a Future of its result; see ``rayrpc.jit.fork``."""
    result: Any = Future()
    waits = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Future)]
    grad = torch.is_grad_enabled()
    if not waits:
        _send(func, args, kwargs, grad, result)
        return result

    def go(_: Any) -> None:
        try:
            _send(func, args, kwargs, grad, result)
        except Exception as exc:
            complete(result, Error(exc))

    all_of: Any = collect_all(waits)
    all_of.add_done_callback(go)
    return result


def _send(func: Any, args: Any, kwargs: Any, grad: bool, result: Any) -> None:
    worker = _workers.take()
    try:
        task, leaves = _pack(func, args, kwargs, grad, worker)
        future = call_without_context(current.get_agent().lookup(worker).id, _run, (task,), None)
    except BaseException:
        _workers.give_back(worker)
        raise

    def arrived(done: Any) -> None:
        _workers.give_back(worker)
        complete(result, attempt(lambda: _unpack(done.value(), leaves)))

    future.add_done_callback(arrived)


def _pack(
    func: Any, args: Any, kwargs: Any, grad: bool, worker: str
) -> tuple[_Task, list[torch.Tensor]]:
    """Return a task for a worker, and the tensors here that its result is to be joined to."""
    inputs: list[torch.Tensor] = []
    modules: dict[Any, _Kept] = {}

    def keep(module: Any) -> _Kept:
        if module not in modules:
            modules[module] = _Kept(_kept.at(worker, module))
        return modules[module]

    def pack(value: Any) -> Any:
        if isinstance(value, _Module):
            return keep(value)
        if isinstance(value, Future):
            return _Settled(attempt(value.wait))
        if isinstance(value, torch.Tensor) and value.requires_grad:
            inputs.append(value)
            return _Slot(len(inputs) - 1)
        return value

    owner = getattr(func, "__self__", None)
    if isinstance(owner, _Module) and hasattr(type(owner), func.__name__):
        func = _Kept(keep(owner).rref, func.__name__)
    else:
        func = pack(func)
    args, kwargs = tree_map(pack, (args, kwargs))
    joined = [
        parameter
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    bare = [each.detach() for each in inputs]
    task = _Task(func, args, kwargs, grad, bare, list(modules.values()))
    return task, [*inputs, *joined] if grad else []


class _Modules:
    """The modules that workers keep for this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rrefs: Any = weakref.WeakKeyDictionary()

    def at(self, worker: str, module: Any) -> RRef[Any]:
        """Return the RRef of a module as it is now, at a worker."""
        token = current.get_agent().lookup(worker).token
        state = _state(module)
        with self._lock:
            known = self._rrefs.setdefault(module, {})
            if token not in known or known[token][0] != state:
                known[token] = state, api.remote(worker, _keep, args=(module,))
            rref: RRef[Any] = known[token][1]
            return rref


_kept = _Modules()


def _state(module: Any) -> Any:
    """Return what differs if a module was changed: by its tensors, or plain attributes."""
    plain = (bool, int, float, str, tuple, type(None))
    attributes = [
        (name, key, value)
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, plain)
    ]
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return attributes, [(name, t.requires_grad, _checksum(t.detach())) for name, t in tensors]


def _checksum(tensor: torch.Tensor) -> Any:
    """Return a number that depends on all bytes; ``.data`` can be changed without a new version."""
    size = tensor.numel() * tensor.element_size()
    known = (tuple(tensor.shape), tensor._version, tensor.data_ptr())
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or size == 0:
        return known
    flat = tensor.view(-1).view(torch.int64 if size % 8 == 0 else torch.uint8)
    return (*known, int(flat.sum()))


def _unpack(reply: Any, leaves: list[torch.Tensor]) -> Any:
    """Return a task's result, joined to the graph here."""
    value, tensors, graph = reply
    if tensors:
        with torch.enable_grad():
            tensors = _forked.apply(graph, tensors, *leaves)

    def unpack(each: Any) -> Any:
        if isinstance(each, _Slot):
            return tensors[each.number]
        return each.future() if isinstance(each, _Settled) else each

    return tree_map(unpack, value)


class _Forked(torch.autograd.Function):
    """A task as a node of the local graph."""

    @staticmethod
    def forward(ctx: Any, graph: Any, results: list[torch.Tensor], *leaves: torch.Tensor) -> Any:
        ctx.graph = graph
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        args = (ctx.graph, gradients)
        owner = ctx.graph.owner().id
        return None, None, *start_without_context(owner, _backward, args, None)()


_forked: Any = _Forked


# -- the worker ---------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """The ends of a task's graph."""

    results: list[torch.Tensor]
    leaves: list[torch.Tensor]


def _keep(module: Any) -> Any:
    return module


@async_execution
def _run(task: _Task) -> Any:
    inputs = [each.requires_grad_() for each in task.inputs]

    def unpack(value: Any) -> Any:
        if isinstance(value, _Slot):
            return inputs[value.number]
        if isinstance(value, _Kept):
            module = value.rref.local_value()
            return getattr(module, value.method) if value.method else module
        return value.future() if isinstance(value, _Settled) else value

    func, args, kwargs = tree_map(unpack, (task.func, task.args, task.kwargs))
    with torch.set_grad_enabled(task.grad):
        value = func(*args, **kwargs)
    leaves = [*inputs, *_parameters(task.modules)] if task.grad else []
    return _reply(value, leaves)


def _parameters(modules: list[_Kept]) -> list[torch.Tensor]:
    return [p for kept in modules for p in kept.rref.local_value().parameters() if p.requires_grad]


def _reply(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Return a Future of what to send, which is there when the Futures in the value are done."""
    waits: list[Any] = []
    results: list[torch.Tensor] = []

    def pack(each: Any) -> Any:
        if isinstance(each, Future):
            waits.append(each)
        elif isinstance(each, torch.Tensor) and each.requires_grad:
            if not leaves:
                return each.detach()
            results.append(each)
            return _Slot(len(results) - 1)
        return each

    packed = tree_map(pack, value)
    graph = RRef(_Graph(results, leaves)) if results else None
    reply: Any = Future()

    def send(_: Any = None) -> None:
        settled = tree_map_only(Future, lambda future: _Settled(attempt(future.wait)), packed)
        reply.set_result((settled, [result.detach() for result in results], graph))

    if waits:
        all_of: Any = collect_all(waits)
        all_of.add_done_callback(send)
    else:
        send()
    return reply


def _backward(rref: RRef[_Graph], gradients: Any) -> Any:
    results, leaves = rref.local_value()
    ends = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
    if not ends:
        return [None] * len(leaves)
    return torch.autograd.grad(
        [result for result, _ in ends],
        leaves,
        [gradient for _, gradient in ends],
        retain_graph=True,  # it goes with the RRef
        allow_unused=True,
    )
