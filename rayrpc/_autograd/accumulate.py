"""Gradients of leaves: accumulated by context, never in ``.grad``.

A leaf whose node has hooks gets its gradient from torch's engine all the same, into a ``.grad``
that replaces the user's for that moment. So do all leaves where torch's process groups are in use:
DDP's reducer averages what it finds in ``.grad``.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

__all__ = ["LeafGradients", "add", "hooked_nodes", "suspend_hooks"]

# So many leaves are known to have no hooks before all are forgotten.
MAX_KNOWN_LEAVES = 1 << 16

_use_count: Any = getattr(torch.Tensor, "_use_count", lambda tensor: 2)  # newer torch has it

# One thread at a time changes leaves' ``.grad`` or hooks.
_lock = threading.RLock()


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


class _HookFinder:
    """Find leaves that have hooks on their nodes, and remember those that have none.

    Torch has no query for it: only registering a hook returns the node's others. What is
    remembered holds until any hook is registered anywhere, because torch numbers hooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._without: set[int] = set()  # leaves' ids; a new leaf with an old id has no hook yet
        self._next_id = -1  # of ``RemovableHandle``, when ``_without`` was filled

    def hooked(self, nodes: Sequence[Any]) -> list[Any]:
        """Return those nodes of leaves that have hooks."""
        with self._lock:
            if RemovableHandle.next_id != self._next_id or len(self._without) > MAX_KNOWN_LEAVES:
                self._without.clear()
                self._next_id = RemovableHandle.next_id
            found = []
            for node in nodes:
                if id(node.variable) in self._without:
                    continue
                if node.variable._post_accumulate_grad_hooks or self._has_hooks(node):
                    found.append(node)
                else:
                    self._without.add(id(node.variable))
            return found

    def _has_hooks(self, node: Any) -> bool:
        return any(map(self._has_others, (node.register_hook, node.register_prehook)))

    def _has_others(self, register: Any) -> bool:
        self._next_id += 1  # the probe's
        probe = register(_probe)
        hooks = probe.hooks_dict_ref()
        probe.remove()
        return bool(hooks)


_finder = _HookFinder()


def _probe(*_: Any) -> None:
    return None


def hooked_nodes(nodes: Sequence[Any]) -> Sequence[Any]:
    """Return those nodes of leaves that torch's engine has to run, because of their hooks.

    Args:
        nodes: ``AccumulateGrad`` nodes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return nodes  # DDP's hooks cannot be seen
    return _finder.hooked(nodes)


@contextlib.contextmanager
def suspend_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Remove the tensor hooks of leaves while in the context."""
    hooks = [h for h in (leaf._backward_hooks for leaf in leaves) if h]
    if not hooks:
        yield
        return
    with _lock:
        saved = [collections.OrderedDict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, was in zip(hooks, saved, strict=True):
                each.update(was)


class LeafGradients(NamedTuple):
    """Gradients of leaves, as one pass yields them.

    Args:
        gradients (dict): by the leaf's ``AccumulateGrad`` node.
        hooked (set): those of these nodes that have hooks, for torch's engine to run.
    """

    gradients: dict[Any, torch.Tensor]
    hooked: set[Any]

    def accumulate_into(self, totals: dict[torch.Tensor, torch.Tensor], lock: Any) -> None:
        """Move the gradients into those of a context.

        Args:
            totals: the context's gradients, by leaf.
            lock: guards ``totals``.
        """
        gradients = self.gradients
        for_engine = {n: gradients[n] for n in self.hooked if n in gradients}
        uses = collections.Counter(_memory(gradient) for gradient in gradients.values())
        owned: dict[torch.Tensor, torch.Tensor] = {}
        while gradients:
            node, gradient = gradients.popitem()
            if node not in for_engine:
                is_alone = uses[_memory(gradient)] == 1
                owned[node.variable] = _owned(gradient, node.variable, is_alone)
        if for_engine:
            owned.update(_run_nodes(for_engine))
        with lock, torch.no_grad():
            for leaf, gradient in owned.items():
                total = totals.get(leaf)
                if total is None:
                    totals[leaf] = gradient
                elif total.layout is torch.strided and gradient.layout is torch.strided:
                    total += gradient
                else:
                    totals[leaf] = add(total, gradient)


def _memory(gradient: torch.Tensor) -> int:
    return (gradient._values() if gradient.is_sparse else gradient).data_ptr()


def _owned(gradient: torch.Tensor, leaf: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Return a gradient with memory of its own, laid out like its leaf, by torch's rules."""
    if is_alone and _use_count(gradient) == 1:
        if gradient.is_sparse:
            if gradient._indices().is_contiguous() and gradient._values().is_contiguous():
                return gradient.detach()
        elif gradient.layout is not torch.strided or gradient.stride() == leaf.stride():
            return gradient.detach()
    if gradient.layout is torch.strided and leaf.layout is torch.strided:
        return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    return gradient.detach().clone()


def _run_nodes(gradients: dict[Any, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Let torch's engine run leaves' nodes; return what that left in ``.grad``, by leaf."""
    leaves = [node.variable for node in gradients]
    with _lock:
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch.autograd.backward(
                [GradientEdge(node, 0, None) for node in gradients], list(gradients.values())
            )
            return {leaf: _unshared(leaf.grad) for leaf in leaves if leaf.grad is not None}
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _unshared(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that shares no memory; DDP may keep the given one in its buckets."""
    if gradient.layout is torch.strided:
        size = gradient.numel() * gradient.element_size()
        if gradient.untyped_storage().nbytes() != size:
            return gradient.detach().clone()
    return gradient.detach()
