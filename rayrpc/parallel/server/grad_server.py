"""A server that trains one model with the gradients of many clients, reduced in a tree.

The path of gradients, and of the parameters that come back::

    clients ──> secondary reducers ──> primary reducer: optimizer step ──> ordered server
                                                                               │
    clients <───────────────────────── parameters ─────────────────────────────┘
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import random
import threading

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.threads import new_thread
from rayrpc._concurrency.waiting import Event, Notifier
from rayrpc.parallel.distributed import RpcGroup
from rayrpc.parallel.server.model_server import PushPullModelServer, set_version
from rayrpc.parallel.server.ordered_server import OrderedServerBase, make_default_server

__all__ = ["PushPullGradServer", "PushPullGradServerImpl", "ReduceType"]

logger = logging.getLogger(__name__)

Gradients = dict[str, torch.Tensor]


class ReduceType(enum.Enum):
    """Name the level of the tree that gradients are pushed to.

    Source: ``machin.parallel.server.grad_server.ReduceType``.
    """

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


def _service_key(server_name: str, member: str) -> str:
    return f"{server_name}/{member}/_push_service"


class PushPullGradServer:
    """Push gradients to a gradient server, and pull parameters; can be sent to other processes.

    Args:
        server_name (str): of the server.
        group (RpcGroup): of the server.
        model_name (str): key of the model in the ordered server.
        secondary_reducers (list[str]): names of the processes that receive gradients.
        o_server (OrderedServerBase): stores the parameters.

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
        self.secondary_services = [_service_key(server_name, name) for name in secondary_reducers]

    def push(self, model: nn.Module) -> None:
        """Push a model's gradients, clear them, and pull the newest parameters.

        Args:
            model (nn.Module): every parameter has a gradient.

        Raises:
            RuntimeError: a parameter has none.
            WorkerDiedError: a process of the server died.
            Exception: what ended the reducer that the gradients were sent to.

        Source: ``machin.parallel.server.PushPullGradServer.push``.
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
            model (nn.Module): of the shape of the managed one; changed in place.

        Returns:
            bool: False if there are none: the first are those of the optimizer's first step.

        Source: ``machin.parallel.server.PushPullGradServer.pull``.
        """
        model.zero_grad()
        found = self.o_server.pull(self.model_name)
        if found is not None:
            model.load_state_dict(found[0])
        return found is not None


class PushPullGradServerImpl:
    """Reduce gradients in this process: the primary reducer, or a secondary one.

    Make one in each of these processes, call ``manage_model`` in the primary reducer, and
    ``start`` in all.  A secondary reducer sends each reduced batch to the primary one; that takes
    a step of its optimizer with each reduced batch, and pushes the parameters to the ordered
    server.  Clients get a ``PushPullGradServer`` by ``group.get_paired(server_name)``.

    Args:
        server_name (str): unique in the group.
        group (RpcGroup): this process is a member.
        model_name (str): key of the model in the ordered server.
        primary_reducer (str, optional): name of a process; default: the group's first.
        secondary_reducers (list[str], optional): names of processes; default: all of the group.
        o_server (OrderedServerBase, optional): stores the parameters; default: a new one, in the
            primary reducer.
        reduce_method (str): "sum" or "mean".
        reduce_device (torch.device | str): where gradients are reduced.
        reduce_batch_size (int): number of sets of gradients in a batch, at least 2.
        max_queue_size (int): number of sets that may wait; the oldest are dropped, with a
            warning.

    Raises:
        ValueError: an argument is out of range, or a reducer is not in the group.
        KeyError: the group has a server of this name.

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
            o_server = make_default_server(server_name, group, is_here=self._is_primary)
        self.o_server = o_server
        self.reduce_method = reduce_method
        self.reduce_device = reduce_device
        self.reduce_batch_size = reduce_batch_size
        self.max_queue_size = max_queue_size
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self._queues: dict[ReduceType, collections.deque[Gradients]] = {
            level: collections.deque() for level in ReduceType
        }
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._is_stopping = False
        self._ended: Event | None = None  # of the thread; None: there is none
        self._error: BaseException | None = None
        group.register(_service_key(server_name, group.get_cur_name()), self._push_service)
        if self._is_primary:
            accessor = PushPullGradServer(
                server_name, group, model_name, self.secondary_reducers, o_server
            )
            group.pair(server_name, accessor)

    def manage_model(
        self, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> None:
        """Set the model to train; called in the primary reducer, before ``start``.

        Args:
            model (nn.Module): used by this server alone.
            optimizer (Optimizer): of its parameters.
            lr_scheduler (LRScheduler, optional): takes a step after each of the optimizer.

        Raises:
            RuntimeError: this process is not the primary reducer.

        Source: ``machin.parallel.server.PushPullGradServerImpl.manage_model``.
        """
        if not self._is_primary:
            raise RuntimeError(
                f"process {self.group.get_cur_name()!r} cannot manage the model: the primary "
                f"reducer of {self.server_name!r} is {self.primary_reducer!r}"
            )
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        set_version(model, 0)

    def start(self) -> None:
        """Start reducing, in a thread; further calls do nothing.

        Source: ``machin.parallel.server.PushPullGradServerImpl.start``.
        """
        if self._ended is None:
            self._is_stopping = False
            ended = Event()
            run = functools.partial(self._run, ended)
            new_thread(run, f"rayrpc-reducer-{self.server_name}").start()
            self._ended = ended

    def stop(self) -> None:
        """Stop the thread after the batch that it is reducing; further calls do nothing.

        Source: ``machin.parallel.server.PushPullGradServerImpl.stop``.
        """
        ended = self._ended
        if ended is not None:
            self._is_stopping = True
            self._changed.notify_all()
            ended.wait()
            self._ended = None  # last: after an interrupt another call stops it

    def watch(self) -> None:
        """Raise the error that ended the thread, if one did.

        Raises:
            Exception: that error.

        Source: ``machin.parallel.server.PushPullGradServerImpl.watch``.
        """
        if self._error is not None:
            raise fresh(self._error)

    def _push_service(self, gradients: Gradients, level: ReduceType) -> None:
        self.watch()  # gradients for an ended thread are refused
        with self._lock:
            queue = self._queues[level]
            queue.append(gradients)
            if len(queue) > self.max_queue_size:
                queue.popleft()
                logger.warning(
                    "%s dropped gradients: more than max_queue_size=%d wait at %s",
                    *(self.server_name, self.max_queue_size, self.group.get_cur_name()),
                )
        self._changed.notify_all()

    def _next_batch(self) -> tuple[ReduceType, list[Gradients]] | None:
        """Wait for a batch, and return its level and gradients; None: stop."""
        self._changed.wait_until(lambda: self._is_stopping or self._full_level() is not None)
        with self._lock:
            level = self._full_level()
            if self._is_stopping or level is None:
                return None
            queue = self._queues[level]
            return level, [queue.popleft() for _ in range(self.reduce_batch_size)]

    def _full_level(self) -> ReduceType | None:
        """Return the first level at which a batch of gradients waits."""
        for level, queue in self._queues.items():
            if len(queue) >= self.reduce_batch_size:
                return level
        return None

    def _run(self, ended: Event) -> None:
        try:
            while (found := self._next_batch()) is not None:
                level, batch = found
                gradients = self._reduce(batch)
                if level is ReduceType.REDUCE_SECONDARY:
                    service = _service_key(self.server_name, self.primary_reducer)
                    args = (gradients, ReduceType.REDUCE_PRIMARY)
                    self.group.registered_sync(service, args=args)
                else:
                    self._step(gradients)
        except BaseException as exc:
            self._error = exc
            logger.exception("the reducer of %s ended", self.server_name)
        ended.set()

    def _reduce(self, batch: list[Gradients]) -> Gradients:
        reduced = {}
        for name in batch[0]:
            parts = [each[name].to(self.reduce_device) for each in batch]
            total = torch.stack(parts).sum(0)
            reduced[name] = total / len(parts) if self.reduce_method == "mean" else total
        return reduced

    def _step(self, gradients: Gradients) -> None:
        if self.model is None or self.optimizer is None:
            return
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].to(parameter.device)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # if another process has pushed, this loads its parameters, as clients do
        PushPullModelServer(self.model_name, self.o_server).push(self.model)
