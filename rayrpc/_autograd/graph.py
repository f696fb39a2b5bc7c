"""One worker's part of the graph in a backward pass, run by torch's own engine.

Gradients come in at *entries* (the roots, or a sent message), and leave at *exits* (a received
message) and leaves.  An exit may depend on an entry whose gradients have not arrived, perhaps
because they depend on another exit of the same graph:

    entry 1 ──> exit 1 ··> other workers ··> entry 2 ──> exit 2, leaves

So the graph is run in stages: each runs the entries that have arrived, together, and adds to the
sums of earlier stages; an exit's gradients leave once all entries that lead to it were run.
(Torch's engine cannot stop at an edge beyond which anything is asked for, so a node that two
stages reach is run by both; as gradients add up, that is right.)  A node that no entry leads to
takes no part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from rayrpc._autograd.accumulate import LeafGradients, add, hooked_nodes, suspend_hooks

__all__ = ["Entry", "GradGraph", "ROOTS", "Stage"]

#: the key of the entry of a pass's roots, beside the ids of messages
ROOTS = -1

_one = torch.ones((), requires_grad=True)
_grad_fn: Any = _one.view(1).grad_fn
_LEAF: Any = type(_grad_fn.next_functions[0][0])
_run_backward: Any = torch.autograd.graph._engine_run_backward


class Entry:
    """Where gradients come in, and the exits and leaves that it leads to.

    Args:
        edges (Iterable): one for each tensor, as in ``next_functions``; its node is None if the
            tensor needs no gradient.
        is_exit (Callable): tells whether a node is a receive function.
    """

    def __init__(self, edges: Iterable[tuple[Any, int]], is_exit: Callable[[Any], bool]) -> None:
        self.edges = [GradientEdge(node, number, None) for node, number in edges]
        #: receive functions
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
    """The results of one stage.

    Args:
        exits (dict): for each receive function whose gradients are complete: its gradients, by
            the number of the tensor; a tensor that was not used has none.
        leaves (LeafGradients | None): gradients of leaves; with the last stage only.
    """

    exits: dict[Any, dict[int, torch.Tensor]]
    leaves: LeafGradients | None


class GradGraph:
    """This worker's part of the graph in one pass.

    Args:
        entries (dict[int, Entry]): those that take part, by the id of their message, or ``ROOTS``.
        retain (bool): keep the graph for another pass.
    """

    def __init__(self, entries: dict[int, Entry], retain: bool) -> None:
        self._entries = entries
        self._retain = retain
        self._lock = threading.Lock()
        self._missing = set(entries)  # entries without gradients so far
        self._arrived: dict[int, Sequence[torch.Tensor | None]] = {}  # for entries not yet run
        self._exits = {node for entry in entries.values() for node in entry.exits}
        self._sums: dict[GradientEdge, torch.Tensor] = {}  # at the targets, of all stages so far
        self._hooked: set[Any] = set()  # leaves' nodes that torch's engine has to run
        self._is_first = True

    def add_gradients(self, key: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of an entry's tensors, once; None for a tensor that was not used."""
        with self._lock:
            if key in self._missing:
                self._missing.remove(key)
                self._arrived[key] = gradients

    def missing(self) -> set[int]:
        """Return the entries whose gradients have not arrived."""
        with self._lock:
            return set(self._missing)

    def run(self) -> Stage | None:
        """Run the entries that have arrived, if that completes an exit, or the graph.

        One thread at a time; others may add gradients meanwhile.

        Returns:
            None if nothing can be completed yet.
        """
        with self._lock:
            is_last = not self._missing
            incomplete = {node for key in self._missing for node in self._entries[key].exits}
            ready = self._exits - incomplete
            if not self._arrived or not (ready or is_last):
                return None
            arrived, self._arrived = self._arrived, {}
            self._exits -= ready
        self._run_engine(arrived, is_last)
        self._is_first = False
        exits: dict[Any, dict[int, torch.Tensor]] = {node: {} for node in ready}
        for edge in [edge for edge in self._sums if edge.node in ready]:
            exits[edge.node][edge.output_nr] = self._sums.pop(edge)
        if not is_last:
            return Stage(exits, None)
        gradients = {edge.node: gradient for edge, gradient in self._sums.items()}
        self._sums = {}
        return Stage(exits, LeafGradients(gradients, self._hooked))

    def _run_engine(self, arrived: dict[int, Sequence[torch.Tensor | None]], is_last: bool) -> None:
        """Run torch's engine from entries; add the results to the sums. Empties ``arrived``."""
        seeds: dict[GradientEdge, torch.Tensor] = {}
        targets: set[GradientEdge] = set()
        for key, gradients in arrived.items():
            entry = self._entries[key]
            targets |= entry.targets
            for edge, gradient in zip(entry.edges, gradients, strict=True):
                if edge.node is not None and gradient is not None:
                    seeds[edge] = add(seeds[edge], gradient) if edge in seeds else gradient
        arrived.clear()
        if not seeds or not targets:
            return
        order = list(targets)
        with suspend_hooks(self._hooked_leaves(targets, self._is_first and is_last)):
            # what torch.autograd.grad calls after checks that take as long as a small pass
            results = _run_backward(
                tuple(seeds),
                tuple(seeds.values()),
                self._retain or not is_last,
                create_graph=False,
                inputs=tuple(order),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        del seeds
        for edge, gradient in zip(order, results, strict=True):
            if gradient is not None:
                total = self._sums.get(edge)
                self._sums[edge] = gradient if total is None else add(total, gradient)

    def _hooked_leaves(self, targets: set[GradientEdge], is_only: bool) -> list[torch.Tensor]:
        """Return leaves whose hooks must see the whole gradient, not what this stage yields.

        Args:
            is_only: this stage is the only one; tensor hooks may run in it.
        """
        leaves: list[Any] = [edge.node for edge in targets if type(edge.node) is _LEAF]
        hooked = set(hooked_nodes(leaves))
        if not is_only:
            hooked.update(node for node in leaves if node.variable._backward_hooks)
        self._hooked |= hooked
        return [node.variable for node in hooked]
