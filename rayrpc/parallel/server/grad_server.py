"""A server that trains one model with the gradients of many clients, reduced in a tree.

clients ──> secondary reducers ──> primary reducer: optimizer step ──> ordered server
                                                                           │
clients <───────────────────────── parameters ─────────────────────────────┘
"""

from __future__ import annotations

import collections
import enum
import logging
import random
import threading
from typing import Any

import torch
from torch import nn

from rayrpc.parallel.distributed import RpcGroup
from rayrpc.parallel.server.model_server import PushPullModelServer
from rayrpc.parallel.server.ordered_server import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
)

__all__ = ["PushPullGradServer", "PushPullGradServerImpl", "ReduceType"]

logger = logging.getLogger(__name__)

Gradients = dict[str, torch.Tensor]


class ReduceType(enum.Enum):
    """The level of the tree that gradients are for."""

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


def _service(server_name: str, member: str) -> str:
    return f"{server_name}/{member}/_push_service"


class PushPullGradServer:
    """Reach a gradient server; can be sent.

    Args:
        server_name (str): of the server.
        group (RpcGroup): where it is.
        model_name (str): key of the model in the ordered server.
        secondary_reducers (list[str]): names of the processes that take gradients.
        o_server (OrderedServerBase): has the parameters.

    Source: ``machin.parallel.server.PushPullGradServer``.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str,
        secondary_reducers: list[str],
        o_server: OrderedServerBase,
    ) -> None:
        self.group = group
        self.model_name = model_name
        self.o_server = o_server
        self.secondary_services = [_service(server_name, name) for name in secondary_reducers]

    def push(self, model: nn.Module) -> None:
        """Push a model's gradients, clear them, and pull the newest parameters.

        Args:
            model (nn.Module): every parameter has a gradient.

        Raises:
            RuntimeError: a parameter has none.
        """
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                raise RuntimeError(f"Parameter {name} doesn't have gradient to push!")
            gradients[name] = parameter.grad.detach().cpu().clone()
        service = random.choice(self.secondary_services)
        self.group.registered_sync(service, args=(gradients, ReduceType.REDUCE_SECONDARY))
        self.pull(model)

    def pull(self, model: nn.Module) -> bool:
        """Load the newest parameters into a model, and clear its gradients.

        Args:
            model (nn.Module): of the shape of the managed one.

        Returns:
            Whether there are any: the first come from the first step.
        """
        model.zero_grad()
        found = self.o_server.pull(self.model_name)
        if found is not None:
            model.load_state_dict(found[0])
        return found is not None


class PushPullGradServerImpl:
    """A gradient server's part in this process: the primary reducer, or a secondary one.

    Make one in each of these, call ``manage_model`` in the primary reducer, and ``start`` in all.
    Each reducer reduces so many sets of gradients at a time; a secondary one pushes the result to
    the primary reducer, which has its optimizer take a step with it, and pushes the parameters to
    the ordered server.

    Args:
        server_name (str): the group's key for its ``PushPullGradServer``.
        group (RpcGroup): this process is a member.
        model_name (str): key of the model in the ordered server.
        primary_reducer (str): name of a process; None: the group's first.
        secondary_reducers (list[str]): names of processes; None: all of the group.
        o_server (OrderedServerBase): gets the parameters; None: one on the primary reducer.
        reduce_method (str): "sum" or "mean".
        reduce_device (torch.device | str): where gradients are reduced.
        reduce_batch_size (int): how many sets are reduced at a time, at least 2.
        max_queue_size (int): how many may wait; the oldest are dropped, with a warning.

    Source: ``machin.parallel.server.PushPullGradServerImpl``.
    """

    REDUCE_MASTER = 0
    REDUCE_SLAVE = 1

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        primary_reducer: str | None = None,
        secondary_reducers: list[str] | None = None,
        o_server: OrderedServerBase | None = None,
        reduce_method: str = "sum",
        reduce_device: torch.device | str = "cpu",
        reduce_batch_size: int = 4,
        max_queue_size: int = 64,
    ) -> None:
        if reduce_method not in ("sum", "mean"):
            raise ValueError(f'reduce_method must be "sum" or "mean", not {reduce_method!r}')
        if not 1 < reduce_batch_size < max_queue_size:
            raise ValueError(
                "reduce_batch_size must be more than 1 and less than max_queue_size, got "
                f"{reduce_batch_size} and {max_queue_size}"
            )
        members = group.get_group_members()
        self.server_name = server_name
        self.group = group
        self.model_name = model_name
        self.primary_reducer = members[0] if primary_reducer is None else primary_reducer
        self.secondary_reducers = members if secondary_reducers is None else secondary_reducers
        for name in (self.primary_reducer, *self.secondary_reducers):
            if not group.is_member(name):
                raise ValueError(f"reducer {name!r} is not in group {group.group_name!r}")
        self._is_primary = group.get_cur_name() == self.primary_reducer
        if o_server is None:
            name = f"{server_name}_o_server"
            if self._is_primary:
                self._o_server_impl = OrderedServerSimpleImpl(name, group)
            o_server = OrderedServerSimple(name, group)
        self.o_server = o_server
        self.reduce_method = reduce_method
        self.reduce_device = reduce_device
        self.reduce_batch_size = reduce_batch_size
        self.max_queue_size = max_queue_size
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._queues: dict[ReduceType, collections.deque[Gradients]] = {
            level: collections.deque() for level in ReduceType
        }
        self._changed = threading.Condition()
        self._stops = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        group.register(_service(server_name, group.get_cur_name()), self._push_service)
        if self._is_primary:
            accessor = PushPullGradServer(
                server_name, group, model_name, self.secondary_reducers, o_server
            )
            group.pair(server_name, accessor)

    def manage_model(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> None:
        """Train a model, in the primary reducer; call it before ``start``.

        Args:
            model (nn.Module): not one that is used otherwise.
            optimizer (Optimizer): of its parameters.
            lr_scheduler: takes a step with the optimizer.

        Raises:
            RuntimeError: this process is not the primary reducer.
        """
        if not self._is_primary:
            raise RuntimeError(
                f"process {self.group.get_cur_name()!r} cannot manage the model: the primary "
                f"reducer of {self.server_name!r} is {self.primary_reducer!r}"
            )
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        model.pp_version = 0  # type: ignore[assignment]

    def start(self) -> None:
        """Reduce what comes in, in a thread, from now on."""
        if self._thread is None:
            self._stops = False
            self._thread = threading.Thread(
                target=self._run, name=f"rayrpc-reducer-{self.server_name}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop, after the batch that is being reduced."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._stops = True
                self._changed.notify_all()
            thread.join()

    def watch(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _push_service(self, gradients: Gradients, level: ReduceType) -> None:
        self.watch()  # who pushes here would wait for nothing
        with self._changed:
            queue = self._queues[level]
            queue.append(gradients)
            if len(queue) > self.max_queue_size:
                queue.popleft()
                logger.warning(
                    "%s dropped gradients: more than max_queue_size=%d wait at %s",
                    *(self.server_name, self.max_queue_size, self.group.get_cur_name()),
                )
            self._changed.notify_all()

    def _next(self) -> tuple[ReduceType, list[Gradients]] | None:
        """Return a batch as soon as there is one; None: stop."""
        with self._changed:
            while not self._stops:
                for level, queue in self._queues.items():
                    if len(queue) >= self.reduce_batch_size:
                        return level, [queue.popleft() for _ in range(self.reduce_batch_size)]
                self._changed.wait()
            return None

    def _run(self) -> None:
        try:
            while (found := self._next()) is not None:
                level, batch = found
                gradients = self._reduce(batch)
                if level is ReduceType.REDUCE_SECONDARY:
                    service = _service(self.server_name, self.primary_reducer)
                    args = (gradients, ReduceType.REDUCE_PRIMARY)
                    self.group.registered_sync(service, args=args)
                else:
                    self._step(gradients)
        except BaseException as exc:
            self._error = exc
            logger.exception("the reducer of %s ended", self.server_name)

    def _reduce(self, batch: list[Gradients]) -> Gradients:
        reduced = {}
        for name in batch[0]:
            parts = [each[name].to(self.reduce_device) for each in batch]
            total = torch.stack(parts).sum(0)
            reduced[name] = total / len(parts) if self.reduce_method == "mean" else total
        return reduced

    def _step(self, gradients: Gradients) -> None:
        if self.model is None:
            return
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].to(parameter.device)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # if another has pushed, its parameters are the newest here, as they are for clients
        PushPullModelServer(self.model_name, self.o_server).push(self.model)
