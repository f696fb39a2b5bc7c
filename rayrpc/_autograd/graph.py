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

from rayrpc._autograd.accumulate import Leaves, added, watched, without_hooks

__all__ = ["Entry", "GradGraph", "Stage"]

_one = torch.ones((), requires_grad=True)
_grad_fn: Any = _one.view(1).grad_fn
_LEAF: Any = type(_grad_fn.next_functions[0][0])
_run_backward: Any = torch.autograd.graph._engine_run_backward


class Entry:
    """Where gradients come in, and what that leads to.

    Args:
        edges (Iterable): one for each tensor, as in ``next_functions``; a node of None: it
            needs none.
        is_exit (Callable): tells whether a node is where a message was received.
    """

    def __init__(self, edges: Iterable[tuple[Any, int]], is_exit: Callable[[Any], bool]) -> None:
        self.edges = [GradientEdge(node, number, None) for node, number in edges]
        #: nodes where messages were received
        self.exits: set[Any] = set()
        #: the edges into these and into leaves
        self.targets: set[GradientEdge] = set()
        seen: set[Any] = set()
        todo: list[tuple[Any, int]] = [edge[:2] for edge in self.edges if edge.node is not None]
        while todo:
            node, number = todo.pop()
            if type(node) is _LEAF:
                self.targets.add(GradientEdge(node, number, None))
                continue
            if node in seen and node not in self.exits:
                continue
            seen.add(node)
            if is_exit(node):
                self.exits.add(node)
                self.targets.add(GradientEdge(node, number, None))
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
        self._parts: dict[GradientEdge, torch.Tensor] = {}  # what flowed to the targets so far
        self._by_node: set[Any] = set()  # leaves whose nodes have to be run
        self._is_first = True

    def feed(self, key: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of an entry's tensors; None for one that was not used."""
        with self._lock:
            if key in self._missing:
                self._missing.remove(key)
                self._fed[key] = gradients

    def missing(self) -> set[Any]:
        """Return the entries that were not fed yet."""
        with self._lock:
            return set(self._missing)

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
        for edge in [edge for edge in self._parts if edge.node in ready]:
            exits[edge.node][edge.output_nr] = self._parts.pop(edge)
        if not is_last:
            return Stage(exits, None)
        gradients = {edge.node: gradient for edge, gradient in self._parts.items()}
        self._parts = {}
        return Stage(exits, Leaves(gradients, self._by_node))

    def _flow(self, fed: dict[Any, Sequence[torch.Tensor | None]], is_last: bool) -> None:
        """Add what comes of the gradients of entries to what there is at the targets."""
        seeds: dict[GradientEdge, torch.Tensor] = {}
        targets: set[GradientEdge] = set()
        for key, gradients in fed.items():
            entry = self._entries[key]
            targets |= entry.targets
            for edge, gradient in zip(entry.edges, gradients, strict=True):
                if edge.node is not None and gradient is not None:
                    seeds[edge] = added(seeds[edge], gradient) if edge in seeds else gradient
        fed.clear()
        if not seeds or not targets:
            return
        order = list(targets)
        with without_hooks(self._hooked_later(targets, self._is_first and is_last)):
            # what torch.autograd.grad calls after checks that take as long as a small pass
            flowed = _run_backward(
                tuple(seeds),
                tuple(seeds.values()),
                self._retain or not is_last,
                create_graph=False,
                inputs=tuple(order),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        del seeds
        for edge, gradient in zip(order, flowed, strict=True):
            if gradient is not None:
                part = self._parts.get(edge)
                self._parts[edge] = gradient if part is None else added(part, gradient)

    def _hooked_later(self, targets: set[GradientEdge], at_once: bool) -> list[torch.Tensor]:
        """Return leaves whose hooks must not see what flows now, but the whole gradient."""
        leaves: list[Any] = [edge.node for edge in targets if type(edge.node) is _LEAF]
        hooked = set(watched(leaves))
        if not at_once:
            hooked.update(node for node in leaves if node.variable._backward_hooks)
        self._by_node |= hooked
        return [node.variable for node in hooked]
