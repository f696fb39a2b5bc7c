"""Distributed autograd: backward passes through calls, as ``torch.distributed.autograd``.

    with rayrpc.autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
        rayrpc.autograd.backward(context_id, [loss])
        gradients = rayrpc.autograd.get_gradients(context_id)

Gradients are kept by context, never in ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.engine import profiled
from rayrpc._autograd.hook import ID_BITS, contexts_of
from rayrpc._autograd.leader import run_backward
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent

__all__ = [
    "DistAutogradContext",
    "GroupAutograd",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]


class context:
    """Open a context for forward and backward passes; a ``with`` statement binds its id, an int.

    Calls made in it, and calls that these make, belong to it; so each worker that they reach has
    the context, too. Its end releases it on all of them.

    Raises:
        RuntimeError: RPC is not initialized, or this thread is in a context already.

    Source: ``torch.distributed.autograd.context``.
    """

    _agent: Agent | None = None  # that of the default group

    def __enter__(self) -> int:
        self._contexts = contexts_of(self._agent)
        self.autograd_context = self._contexts.new(holder=self)
        try:
            self._contexts.open(self.autograd_context)
            context_id = self.autograd_context._context_id()
        except BaseException:  # Ctrl-C, at any point
            self._contexts.end(self.autograd_context)
            raise
        return context_id

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._contexts.release(self.autograd_context._context_id())
        except BaseException:  # Ctrl-C, at any point
            self._contexts.end(self.autograd_context)
            raise


def is_available() -> bool:
    """Tell whether distributed autograd can be used.

    Returns:
        True.

    Source: ``torch.distributed.autograd.is_available``.
    """
    return True


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute gradients of the sum of ``roots`` on all workers that took part in making them.

    They are added to those that the context has; see ``get_gradients``. Messages of the context
    that do not contribute to the roots take no part. Hooks of leaves get whole gradients; hooks of
    tensors inside the graph may get them in parts where a pass reaches a worker several times.

    Args:
        context_id (int): of a context; see ``context``.
        roots (list[torch.Tensor]): tensors of one element, with a ``grad_fn``.
        retain_graph (bool): keep the graph for another pass.

    Raises:
        TypeError: the arguments are no id and list of tensors.
        RuntimeError: there is no such context, a root is no scalar that requires grad, or the
            pass failed on a worker ("Error on Node 1: ...").
        WorkerDiedError: a worker that takes part died.

    Source: ``torch.distributed.autograd.backward``.
    """
    _backward(context_id, roots, retain_graph)


def _backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool,
    agent: Agent | None = None,
) -> None:
    is_list = isinstance(roots, (list, tuple)) and all(isinstance(r, torch.Tensor) for r in roots)
    if not isinstance(context_id, int) or not is_list:
        raise TypeError(
            "backward(): incompatible function arguments. The following argument types are "
            "supported: (context_id: int, roots: list[torch.Tensor], retain_graph: bool = False)"
        )
    with profiled("torch::distributed::autograd::backward"):
        run_backward(context_id, roots, bool(retain_graph), agent)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of this worker's leaves that the passes of a context computed so far.

    Args:
        context_id (int): of a context.

    Returns:
        The sum over the passes by leaf, each of its leaf's shape. A leaf without a gradient is
        missing.

    Raises:
        RuntimeError: there is no such context.
        Exception: gradients could not be added up, such as for lack of memory.

    Source: ``torch.distributed.autograd.get_gradients``.
    """
    return contexts_of().find_context(context_id).gradients()


class GroupAutograd:
    """Distributed autograd in the calls of a group; ``Group.autograd`` returns it.

    A thread is in one context at a time, of whatever group.  A call of another group than that of
    the context refuses tensors that require grad.

    Args:
        agent (Agent): of this process in the group.

    Source: ``torch.distributed.autograd``.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def context(self) -> context:
        """Open a context of the group; see ``rayrpc.autograd.context``.

        Returns:
            A context manager, which binds the context's id.
        """
        made = context()
        made._agent = self._agent
        return made

    def backward(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False
    ) -> None:
        """Compute gradients in a context of the group.

        Args:
            context_id, roots, retain_graph: as for ``rayrpc.autograd.backward``.

        Raises:
            TypeError, RuntimeError, WorkerDiedError: see ``rayrpc.autograd.backward``.
        """
        _backward(context_id, roots, retain_graph, self._agent)

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of this worker's leaves in a context of the group.

        Args:
            context_id (int): of a context.

        Returns:
            As ``rayrpc.autograd.get_gradients``.

        Raises:
            RuntimeError, Exception: see ``rayrpc.autograd.get_gradients``.
        """
        return contexts_of(self._agent).find_context(context_id).gradients()


# -- torch's private names, which its tests and libraries use -----------------------------------


def _init(worker_id: int) -> None:
    """Do nothing: contexts come with ``init_rpc``."""


def _new_context() -> DistAutogradContext:
    contexts = contexts_of()
    opened = contexts.new()
    contexts.open(opened)
    return opened


def _release_context(context_id: int) -> None:
    contexts_of().release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return contexts_of().find_context(context_id)


def _current_context() -> DistAutogradContext:
    return contexts_of().current()


def _is_valid_context(context_id: int) -> None:
    contexts_of().find_context(context_id)


def _get_max_id() -> int:
    return (current.get_agent().info.id << ID_BITS) + (1 << ID_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    """Return torch's counters."""
    if not current.is_set():
        return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
    return contexts_of().debug_info()
