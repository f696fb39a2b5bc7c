"""Gradients of leaves: gathered by context, never in ``.grad``.

A leaf that somebody watches (hooks on its node, and so DDP, whose reducer averages what it finds
in ``.grad``) gets its gradient from torch's engine all the same: into a ``.grad`` that stands in
for the user's for that moment.
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

__all__ = ["Leaves", "added", "watched", "without_hooks"]

MOST_UNWATCHED = 1 << 16  # leaves to remember

_use_count: Any = getattr(torch.Tensor, "_use_count", lambda tensor: 2)  # newer torch has it

# One thread at a time changes leaves' ``.grad`` or hooks.
_lock = threading.RLock()


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


class _Unwatched:
    """Remember which leaves nobody watches: it takes a hook to find out.

    That holds until the next hook is registered anywhere: torch numbers them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaves: set[int] = set()  # by their id; who takes the place of one has no hook yet
        self._hooks = -1  # the number that the next hook was to have

    def sort_out(self, nodes: Sequence[Any]) -> list[Any]:
        """Return those nodes of leaves that somebody watches."""
        with self._lock:
            if RemovableHandle.next_id != self._hooks or len(self._leaves) > MOST_UNWATCHED:
                self._leaves.clear()
                self._hooks = RemovableHandle.next_id
            found = []
            for node in nodes:
                if id(node.variable) in self._leaves:
                    continue
                if node.variable._post_accumulate_grad_hooks or self._has_hooks(node):
                    found.append(node)
                else:
                    self._leaves.add(id(node.variable))
            return found

    def _has_hooks(self, node: Any) -> bool:
        return any(map(self._has_others, (node.register_hook, node.register_prehook)))

    def _has_others(self, register: Any) -> bool:
        self._hooks += 1  # the probe's
        probe = register(_probe)
        hooks = probe.hooks_dict_ref()
        probe.remove()
        return bool(hooks)


_unwatched = _Unwatched()


def watched(nodes: Sequence[Any]) -> Sequence[Any]:
    """Return those nodes of leaves where more than their gradient has to happen."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return nodes  # DDP's hooks cannot be seen
    return _unwatched.sort_out(nodes)


def _probe(*_: Any) -> None:
    return None


@contextlib.contextmanager
def without_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let hooks of tensors rest in the context."""
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


class Leaves(NamedTuple):
    """Gradients of leaves.

    Args:
        gradients (dict): by the leaves' nodes.
        by_node (set): those among these that are to be run, hooks and all.
    """

    gradients: dict[Any, torch.Tensor]
    by_node: set[Any]

    def settle(self, into: dict[torch.Tensor, torch.Tensor], lock: Any) -> None:
        """Add them to those of a context, which has them by leaf; ``lock`` guards it."""
        gradients = self.gradients
        seen_by_others = {n: gradients[n] for n in self.by_node if n in gradients}
        seen = collections.Counter(_memory(gradient) for gradient in gradients.values())
        own: dict[torch.Tensor, torch.Tensor] = {}
        while gradients:
            node, gradient = gradients.popitem()
            if node not in seen_by_others:
                is_alone = seen[_memory(gradient)] == 1
                own[node.variable] = _own(gradient, node.variable, is_alone)
        if seen_by_others:
            own.update(_accumulate(seen_by_others))
        with lock, torch.no_grad():
            for leaf, gradient in own.items():
                there = into.get(leaf)
                if there is None:
                    into[leaf] = gradient
                elif there.layout is torch.strided and gradient.layout is torch.strided:
                    there += gradient
                else:
                    into[leaf] = added(there, gradient)


def _memory(gradient: torch.Tensor) -> int:
    return (gradient._values() if gradient.is_sparse else gradient).data_ptr()


def _own(gradient: torch.Tensor, leaf: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Return a gradient that nobody else holds, laid out like its leaf, as torch does it."""
    if is_alone and _use_count(gradient) == 1:
        if gradient.is_sparse:
            if gradient._indices().is_contiguous() and gradient._values().is_contiguous():
                return gradient.detach()
        elif gradient.layout is not torch.strided or gradient.stride() == leaf.stride():
            return gradient.detach()
    if gradient.layout is torch.strided and leaf.layout is torch.strided:
        return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    return gradient.detach().clone()


def _accumulate(gradients: dict[Any, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Let torch's engine run the leaves' nodes; return what that left in ``.grad``."""
    leaves = [node.variable for node in gradients]
    with _lock:
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch.autograd.backward(
                [GradientEdge(node, 0, None) for node in gradients], list(gradients.values())
            )
            return {leaf: _private(leaf.grad) for leaf in leaves if leaf.grad is not None}
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _private(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as one that shares no memory; DDP may keep it in its buckets."""
    if gradient.layout is torch.strided:
        size = gradient.numel() * gradient.element_size()
        if gradient.untyped_storage().nbytes() != size:
            return gradient.detach().clone()
    return gradient.detach()
