"""Optimizers for parameters that live on several workers, as ``torch.distributed.optim``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rayrpc._autograd.current_context import start_without_context
from rayrpc._autograd.hook import GradContexts, contexts_of
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.started_call import StartedCall
from rayrpc.errors import GroupError, RpcError
from rayrpc.rref_proxy import RRef

__all__ = ["DistributedOptimizer"]


TensorT = TypeVar("TensorT", bound=torch.Tensor)


class DistributedOptimizer:
    """Optimize parameters where they live, with the gradients of an autograd context.

    Steps of several trainers run one after another on each worker, in an order that may differ
    from worker to worker. ``.grad`` of the parameters stays as it is.

    Args:
        optimizer_class (type): a ``torch.optim.Optimizer``, or a class whose ``step`` takes the
            list of gradients ("functional"). Where torch has a functional one for a class (SGD,
            Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop, Rprop), that is used, with its
            defaults.
        params_rref (list[RRef[torch.Tensor]]): the parameters, leaves that require grad.
        args, kwargs: for the constructor of the optimizers, which is called once on each worker
            that owns a parameter.

    Raises:
        Exception: a constructor raised it; RuntimeError if several did.
        GroupError: the RRefs are of several groups.
        WorkerDiedError: a worker that owns a parameter died.

    Source: ``torch.distributed.optim.DistributedOptimizer``.
    """

    #: they take gradients as an argument of ``step``
    is_functional_optim: bool
    #: one for each worker that owns a parameter
    remote_optimizers: list[RRef[Any]]

    def __init__(
        self,
        optimizer_class: type[Any],
        params_rref: Iterable[RRef[TensorT]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        by_owner: dict[Any, list[RRef[TensorT]]] = {}
        groups: dict[str, Any] = {}
        for param in params_rref:
            by_owner.setdefault(param.owner(), []).append(param)
            groups.setdefault(param._home.key, param._home)
        if len(groups) > 1:
            names = " and ".join(map(repr, groups))
            raise GroupError(
                f"the parameters of an optimizer are of one group, not of {names}: "
                "make one for each"
            )
        self._agent: Agent | None = next(iter(groups.values()), None)
        functional = _functional(optimizer_class)
        self.is_functional_optim = not issubclass(functional, torch.optim.Optimizer)
        waits = []
        for worker, params in by_owner.items():
            call = params[0]._get_api().rpc_async  # its group's
            waits.append(call(worker, _make, args=(functional, params, args, kwargs)).wait)
        self.remote_optimizers = _wait_for_all("be constructed", waits)

    def step(self, context_id: int) -> None:
        """Take a step on every worker that owns a parameter, and wait for all of them.

        A parameter without a gradient in the context stays as it is.

        Args:
            context_id (int): of the context with the gradients; see
                ``rayrpc.autograd.context``.

        Raises:
            RuntimeError: there is no such context, or several workers' steps failed.
            Exception: one worker's step raised it; a CallTimeoutError if it took longer than the
                default timeout of RPC.

        Source: ``torch.distributed.optim.DistributedOptimizer.step``.
        """
        agent = self._agent or current.get_agent()
        contexts_of(agent).find_context(context_id)
        timeout = agent.default_timeout
        here = [
            functools.partial(_step, each, context_id)
            for each in self.remote_optimizers
            if each.is_owner()
        ]
        there: list[StartedCall] = []
        try:
            for each in self.remote_optimizers:
                if not each.is_owner():
                    args = each, context_id
                    owner = each.owner().id
                    there.append(start_without_context(agent, owner, _step, args, timeout))
            _wait_for_all("take its step", [*here, *there])
        finally:
            for call in there:  # those that an interrupt has kept from being waited for
                call.abandon()


def _functional(optimizer_class: Any) -> Any:
    """Return torch's functional optimizer of the same name, or the class itself."""
    if optimizer_class.__module__.startswith("torch.optim"):
        from torch.distributed.optim.utils import functional_optim_map

        return functional_optim_map.get(optimizer_class, optimizer_class)
    return optimizer_class


class _LocalOptimizer:
    """The optimizer of one worker's parameters."""

    # Optimizers of several trainers may share parameters; torch has one lock for all, too.
    _lock = threading.Lock()

    def __init__(
        self, contexts: GradContexts, cls: Any, params: list[Any], args: Any, kwargs: Any
    ) -> None:
        self._contexts = contexts
        self._params = params
        self.optim = cls(params, *args, **kwargs)
        self._takes_gradients = "gradients" in inspect.signature(self.optim.step).parameters

    def step(self, context_id: int) -> None:
        context = self._contexts.get(context_id)
        # this worker lacks a context that it was not called in
        found = context.gradients() if context is not None else {}
        gradients = [found.get(param) for param in self._params]
        with self._lock:
            if self._takes_gradients:
                self.optim.step(gradients)
            else:
                self._step(gradients)

    def _step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        before = [param.grad for param in self._params]
        try:
            for param, gradient in zip(self._params, gradients, strict=True):
                param.grad = gradient
            self.optim.step()
        finally:
            for param, gradient in zip(self._params, before, strict=True):
                param.grad = gradient


def _make(cls: Any, params: list[RRef[Any]], args: Any, kwargs: Any) -> RRef[Any]:
    home: Any = params[0]._home
    values = [param.local_value() for param in params]
    return RRef._of(home, _LocalOptimizer(contexts_of(home), cls, values, args, kwargs))


def _step(optimizer: RRef[Any], context_id: int) -> None:
    optimizer.local_value().step(context_id)


def _wait_for_all(what: str, waits: Iterable[Callable[[], Any]]) -> list[Any]:
    results, errors = [], []
    for wait in waits:
        try:
            results.append(wait())
        except Exception as exc:
            errors.append(exc)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join(f"{type(error).__name__}: {error}" for error in errors)
        raise RpcError(
            f"the optimizer could not {what} on {len(errors)} workers:\n{lines}"
        ) from errors[0]
    return results
