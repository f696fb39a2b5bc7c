"""Gradients of leaves: accumulated by context, never in ``.grad``.

Where a leaf has hooks, torch's engine accumulates its gradient nevertheless (``IsolatedLeaves``):
into a temporary ``.grad``, which replaces the user's meanwhile. Where torch's process groups are in
use, the engine does so for all leaves: DDP's reducer averages what it finds in ``.grad``.

The user's ``.grad`` is restored also if an interrupt ends the run, or ends the restoring: the
function that restores it can be called again.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from rayrpc._autograd.edges import edge_at
from rayrpc._concurrency.waiting import Notifier

__all__ = [
    "IsolatedLeaves",
    "LeafGradients",
    "add",
    "has_node_hooks",
    "hooked_leaves",
    "nodes_for_ddp",
]

# Number of leaves without hooks that are cached; a larger cache is cleared.
MAX_KNOWN_LEAVES = 1 << 16

T = TypeVar("T")

# Older torch lacks it: a gradient then counts as used elsewhere, and is copied.
_use_count: Any = getattr(torch.Tensor, "_use_count", lambda tensor: 2)


class _Claims:
    """Lock leaves while a thread changes their ``.grad`` or hooks; other threads wait."""

    def __init__(self) -> None:
        self._claimed: dict[int, object] = {}  # what has claimed a leaf, by the leaf's id
        self._lock = threading.Lock()
        self._changed = Notifier()

    def claim(self, leaves: Sequence[torch.Tensor], by: object) -> None:
        """Wait until none of these leaves is claimed, and claim all.

        Args:
            leaves: the leaves to claim.
            by: the object that claims them.
        """
        claims = dict.fromkeys(map(id, leaves), by)

        def take() -> bool:
            with self._lock:
                if not self._claimed.keys().isdisjoint(claims):
                    return False
                self._claimed.update(claims)
            return True

        self._changed.wait_until(take)

    def release(self, leaves: Sequence[torch.Tensor], by: object) -> None:
        """Release those of the leaves that ``by`` has claimed."""
        with self._lock:
            for leaf in leaves:
                if self._claimed.get(id(leaf)) is by:
                    del self._claimed[id(leaf)]
        self._changed.notify_all()


_claims = _Claims()
_ddp_lock = threading.RLock()  # DDP's reducer takes one pass at a time


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def _run_and_undo(run: Callable[[], T], undo: Callable[[], object]) -> T:
    """Run a function, and undo what it has done, also if an interrupt comes at any point.

    Args:
        run: the function.
        undo: undoes it; may be called again.
    """
    try:
        try:
            result = run()
        finally:
            undo()
    except BaseException:
        undo()  # an interrupt may have ended the first call
        raise
    return result


class _HookFinder:
    """Find nodes that have hooks, and cache the leaves whose nodes have none.

    Torch has no function that tells it: only the handle of a newly registered hook refers to a
    node's other hooks. The cache is valid until any hook is registered, which changes the next id
    of torch's handles.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._without: set[int] = set()  # leaves' ids; a new leaf with an old id has no hook yet
        self._next_id = -1  # ``RemovableHandle.next_id`` when ``_without`` was filled

    def hooked(self, nodes: Iterable[Any]) -> list[Any]:
        """Return those of the leaves' nodes that have hooks, or whose leaves have."""
        with self._lock:
            if RemovableHandle.next_id != self._next_id or len(self._without) > MAX_KNOWN_LEAVES:
                self._without.clear()
                self._next_id = RemovableHandle.next_id
            found = []
            for node in nodes:
                if id(node.variable) in self._without:
                    continue
                if node.variable._post_accumulate_grad_hooks or self.has_hooks(node):
                    found.append(node)
                else:
                    self._without.add(id(node.variable))
            return found

    def has_hooks(self, node: Any) -> bool:
        """Tell whether a node has hooks of its own."""
        return any(map(self._has_others, (node.register_hook, node.register_prehook)))

    def _has_others(self, register: Any) -> bool:
        self._next_id += 1  # registering the probe takes an id
        probe = register(_probe)
        hooks = probe.hooks_dict_ref()
        probe.remove()
        return bool(hooks)


_finder = _HookFinder()


def _probe(*_: Any) -> None:
    return None


def has_node_hooks(node: Any) -> bool:
    """Tell whether a receive function has hooks of its own."""
    return RemovableHandle.next_id != node.made_at and _finder.has_hooks(node)


def _ddp_may_hook() -> bool:
    # DDP's hooks cannot be detected: expect them where process groups are in use
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def nodes_for_ddp(nodes: Sequence[Any]) -> Sequence[Any]:
    """Return the nodes of leaves that torch's engine has to run once more, for DDP's hooks."""
    return nodes if _ddp_may_hook() else ()


def hooked_leaves(nodes: Sequence[Any]) -> bool:
    """Tell whether leaves have hooks for which torch's engine has to run their nodes.

    Args:
        nodes: ``AccumulateGrad`` nodes.
    """
    if any(node.variable._backward_hooks for node in nodes):
        return True
    return not _ddp_may_hook() and bool(_finder.hooked(nodes))


class IsolatedLeaves:
    """Have torch's engine accumulate gradients into a temporary ``.grad`` of each leaf.

    The user's ``.grad`` is replaced only while the engine runs the leaf's node and its hooks.

    Args:
        nodes (Iterable): ``AccumulateGrad`` nodes; other leaves are not changed.
        is_ours (Callable): tells, in a hook, whether this run of the engine called the hook.
    """

    def __init__(self, nodes: Iterable[Any], is_ours: Callable[[], bool]) -> None:
        self._nodes = list(nodes)
        self._is_ours = is_ours
        self._handles: list[RemovableHandle] = []
        self._replaced: dict[Any, torch.Tensor | None] = {}  # the user's ``.grad``, by node
        #: what was accumulated, by node
        self.gradients: dict[Any, torch.Tensor] = {}

    def run(self, run_engine: Callable[[], object]) -> None:
        """Have torch's engine run the nodes.

        Args:
            run_engine: runs the engine, from this thread.
        """

        def run() -> None:
            self._add_hooks()
            run_engine()

        _run_and_undo(run, self._undo)

    def _add_hooks(self) -> None:
        for node in self._nodes:
            before = functools.partial(self._before, node)
            after = functools.partial(self._after, node)
            self._handles.append(node.register_prehook(before))
            self._handles.append(node.register_hook(after))

    def _undo(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        for node in list(self._replaced):  # a hook failed
            self._restore(node)
        _claims.release([node.variable for node in self._nodes], self)

    def _before(self, node: Any, gradients: Any) -> None:
        if self._is_ours():
            leaf = node.variable
            _claims.claim([leaf], self)
            self._replaced[node] = leaf.grad
            leaf.grad = None

    def _after(self, node: Any, *_: Any) -> None:
        if self._is_ours():
            gradient = node.variable.grad
            if gradient is not None:
                self.gradients[node] = gradient.detach()
            self._restore(node)

    def _restore(self, node: Any) -> None:
        leaf = node.variable
        leaf.grad = self._replaced[node]
        del self._replaced[node]  # last, as an interrupt may come before it
        _claims.release([leaf], self)


@contextlib.contextmanager
def _suspended_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Remove leaves' tensor hooks, which have run already, within the ``with`` statement."""
    hooks = [h for h in (leaf._backward_hooks for leaf in leaves) if h]
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
        for_ddp (set): the nodes among them that torch's engine has to run for DDP's hooks.
    """

    gradients: dict[Any, torch.Tensor]
    for_ddp: set[Any]

    def accumulate_into(self, totals: dict[torch.Tensor, torch.Tensor], lock: Any) -> None:
        """Move the gradients into the totals of a context.

        Args:
            totals: the context's gradients, by leaf.
            lock: guards ``totals``.
        """
        gradients = self.gradients
        for_engine = {n: gradients[n] for n in self.for_ddp if n in gradients}
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
    """Have torch's engine run leaves' nodes; return what it left in ``.grad``, by leaf."""
    leaves = [node.variable for node in gradients]
    with _ddp_lock:
        result = _run_claimed(gradients, leaves)
    return result


def _run_claimed(
    gradients: dict[Any, torch.Tensor], leaves: list[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    before: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def run() -> dict[torch.Tensor, torch.Tensor]:
        _claims.claim(leaves, by=before)
        for leaf in leaves:
            before.append((leaf, leaf.grad))
            leaf.grad = None
        with _suspended_hooks(leaves):
            torch.autograd.backward([edge_at(node) for node in gradients], list(gradients.values()))
        return {leaf: _unshared(leaf.grad) for leaf in leaves if leaf.grad is not None}

    def undo() -> None:
        while before:
            leaf, gradient = before[-1]
            leaf.grad = gradient
            before.pop()
        _claims.release(leaves, by=before)

    return _run_and_undo(run, undo)


def _unshared(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that shares no memory: DDP may keep the given one in a bucket."""
    if gradient.layout is torch.strided:
        size = gradient.numel() * gradient.element_size()
        if gradient.untyped_storage().nbytes() != size:
            return gradient.detach().clone()
    return gradient.detach()
