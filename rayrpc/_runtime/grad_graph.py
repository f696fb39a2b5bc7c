"""One worker's part of a backward pass, run by torch's own engine.

Gradients come in at *entries* (the roots, or a message that was sent), and go out at *exits* (a
message that was received) and leaves.  An exit may depend on an entry whose gradients are only
on their way, perhaps because of another exit of the same graph:

    entry 1 ──> exit 1 ··> other workers ··> entry 2 ──> exit 2, leaves

So the graph is run in stages: each runs the entries that have arrived, together, and adds to what
flowed before; an exit's gradients leave once all entries that lead to it were run.  (Torch's
engine cannot stop at an edge beyond which anything is asked for, so what two stages reach is run
by both; as gradients add up, that is right.)  What no entry leads to takes no part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from rayrpc._runtime.grad_leaves import Leaves, added, is_watched, without_hooks

__all__ = ["Edge", "Entry", "GradGraph", "Stage"]

#: a node of torch's graph, and the number of its output that a gradient is for
Edge = tuple[Any, int]

_one = torch.ones((), requires_grad=True)
_grad_fn: Any = _one.view(1).grad_fn
_LEAF: Any = type(_grad_fn.next_functions[0][0])


class Entry:
    """Where gradients come in, and what that leads to.

    Args:
        edges (Iterable[Edge]): one for each tensor; a node of None: it needs none.
        is_exit (Callable): tells whether a node is where a message was received.
    """

    def __init__(self, edges: Iterable[Edge], is_exit: Callable[[Any], bool]) -> None:
        self.edges = list(edges)
        #: nodes where messages were received
        self.exits: set[Any] = set()
        #: the edges into these and into leaves
        self.targets: set[Edge] = set()
        seen: set[Any] = set()
        todo = [edge for edge in self.edges if edge[0] is not None]
        while todo:
            edge = todo.pop()
            node = edge[0]
            if type(node) is _LEAF:
                self.targets.add(edge)
                continue
            if node in seen and node not in self.exits:
                continue
            seen.add(node)
            if is_exit(node):
                self.exits.add(node)
                self.targets.add(edge)
            else:
                todo += [following for following in node.next_functions if following[0] is not None]


class Stage(NamedTuple):
    """What one stage yields.

    Args:
        exits (dict): for the node of each message whose gradients are complete: these, by the
            number of the tensor; a tensor that was not used has none.
        leaves (Leaves | None): those of leaves; with the last stage.
    """

    exits: dict[Any, dict[int, torch.Tensor]]
    leaves: Leaves | None


class GradGraph:
    """The part of this worker in one pass.

    Args:
        entries (dict[Any, Entry]): those that take part, by what they are known by.
        retain (bool): keep the graph for another pass.
    """

    def __init__(self, entries: dict[Any, Entry], retain: bool) -> None:
        self._entries = entries
        self._retain = retain
        self._lock = threading.Lock()
        self._missing = set(entries)  # entries that were not fed yet
        self._fed: dict[Any, Sequence[torch.Tensor | None]] = {}  # ... and not run yet
        self._exits = {node for entry in entries.values() for node in entry.exits}
        self._parts: dict[Edge, torch.Tensor] = {}  # what flowed to the targets so far
        self._by_node: set[Any] = set()  # leaves whose nodes have to be run
        self._is_first = True

    def feed(self, key: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of an entry's tensors; None for one that was not used."""
        with self._lock:
            if key in self._missing:
                self._missing.remove(key)
                self._fed[key] = gradients

    def run(self) -> Stage | None:
        """Run what has been fed, if that completes any exit, or all.

        One thread at a time; others may feed meanwhile.
        """
        with self._lock:
            is_last = not self._missing
            waits = {node for key in self._missing for node in self._entries[key].exits}
            ready = self._exits - waits
            if not self._fed or not (ready or is_last):
                return None
            fed, self._fed = self._fed, {}
            self._exits -= ready
        self._flow(fed, is_last)
        self._is_first = False
        exits: dict[Any, dict[int, torch.Tensor]] = {node: {} for node in ready}
        for node, slot in [edge for edge in self._parts if edge[0] in ready]:
            exits[node][slot] = self._parts.pop((node, slot))
        if not is_last:
            return Stage(exits, None)
        gradients = {node: gradient for (node, _), gradient in self._parts.items()}
        self._parts = {}
        return Stage(exits, Leaves(gradients, self._by_node))

    def _flow(self, fed: dict[Any, Sequence[torch.Tensor | None]], is_last: bool) -> None:
        """Add what comes of the gradients of entries to what there is at the targets."""
        seeds: dict[Edge, torch.Tensor] = {}
        targets: set[Edge] = set()
        for key, gradients in fed.items():
            entry = self._entries[key]
            targets |= entry.targets
            for edge, gradient in zip(entry.edges, gradients, strict=True):
                if edge[0] is not None and gradient is not None:
                    seeds[edge] = added(seeds[edge], gradient) if edge in seeds else gradient
        fed.clear()
        if not seeds or not targets:
            return
        order = list(targets)
        with without_hooks(self._hooked_later(targets, self._is_first and is_last)):
            flowed = torch.autograd.grad(
                [GradientEdge(*edge, None) for edge in seeds],
                [GradientEdge(*edge, None) for edge in order],
                list(seeds.values()),
                retain_graph=self._retain or not is_last,
                allow_unused=True,
            )
        del seeds
        for edge, gradient in zip(order, flowed, strict=True):
            if gradient is not None:
                part = self._parts.get(edge)
                self._parts[edge] = gradient if part is None else added(part, gradient)

    def _hooked_later(self, targets: set[Edge], at_once: bool) -> list[torch.Tensor]:
        """Return leaves whose hooks must not see what flows now, but the whole gradient."""
        hooked = []
        node: Any
        for node, _ in targets:
            if type(node) is _LEAF:
                hooks = node.variable._backward_hooks
                if (hooks and not at_once) or is_watched(node):
                    self._by_node.add(node)
                    hooked.append(node.variable)
        return hooked
