"""One worker's part of the graph in a backward pass, run by torch's own engine.

Gradients come in at *entries* (the roots, or a sent message), and leave at *exits* (a received
message) and leaves.  An exit may depend on an entry whose gradients have not arrived, perhaps
because they depend on another exit of the same graph:

    entry 1 ──> exit 1 ··> other workers ··> entry 2 ──> exit 2, leaves

So the graph is run in stages: a stage runs entries whose gradients have arrived, together, up to
exits that no other entry leads to.  That is correct as long as no two stages reach the same node;
where two would, or where a leaf or an exit has hooks, one run of the engine does the rest
(``whole_run.py``).  Either way each node runs once, with its whole gradient.  A node that no entry
leads to takes no part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from rayrpc._autograd.accumulate import (
    LeafGradients,
    add,
    has_node_hooks,
    hooked_leaves,
    nodes_for_ddp,
)
from rayrpc._autograd.edges import edge_at
from rayrpc._autograd.engine import AccumulateGrad, profiled, run_engine, seeds_of
from rayrpc._autograd.functions import SEND_NODE
from rayrpc._autograd.whole_run import Leave, Noted, WholeRun

__all__ = ["Entry", "GradGraph", "ROOTS", "Stage", "WHOLE_RUN"]

#: the key of the roots' entry; the key of any other entry is its message's id
ROOTS = -1
#: returned instead of a stage: ``GradGraph.run_whole`` has to run the rest
WHOLE_RUN: Final = "whole run"


class Entry:
    """Where gradients come in, and the exits and leaves that it leads to.

    Args:
        edges (Mapping): the edges to the tensors that take part, as in ``next_functions``, by the
            tensor's number in the message; the node is None if the tensor needs no gradient.
        is_exit (Callable): tells whether a node is a receive function.
        gates (Mapping): the gate of each of these tensors; empty for roots.
    """

    def __init__(
        self,
        edges: Mapping[int, tuple[Any, int]],
        is_exit: Callable[[Any], bool],
        gates: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.edges = {slot: edge_at(*edge) for slot, edge in edges.items()}
        self.gates = dict(gates or {})
        #: the receive functions that it leads to
        self.exits: set[Any] = set()
        #: all nodes that it leads to, but for those of leaves
        self.nodes: set[Any] = set()
        #: the edges into receive functions and into leaves
        self.targets: set[GradientEdge] = set()
        todo: list[tuple[Any, int]] = [
            edge[:2] for edge in self.edges.values() if edge.node is not None
        ]
        while todo:
            node, number = todo.pop()
            if type(node) is AccumulateGrad:
                self.targets.add(edge_at(node, number))
                continue
            if node in self.nodes and node not in self.exits:
                continue
            self.nodes.add(node)
            if is_exit(node):
                self.exits.add(node)
                self.targets.add(edge_at(node, number))
            else:
                todo += [following for following in node.next_functions if following[0] is not None]

    @staticmethod
    def union(parts: Sequence[Entry]) -> Entry:
        """Return the entry of several tensors of one message."""
        if len(parts) == 1:
            return parts[0]
        whole = Entry({}, lambda node: False)
        for part in parts:
            whole.edges.update(part.edges)
            whole.gates.update(part.gates)
            whole.exits |= part.exits
            whole.nodes |= part.nodes
            whole.targets |= part.targets
        return whole


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
        entries (dict[int, Entry]): the entries that take part, by their message's id, or ``ROOTS``.
        retain (bool): keep the graph for another pass.
    """

    def __init__(self, entries: dict[int, Entry], retain: bool) -> None:
        self._entries = entries
        self._retain = retain
        self._lock = threading.Lock()
        self._missing = set(entries)  # entries whose gradients have not arrived
        self._arrived: dict[int, Sequence[torch.Tensor | None]] = {}  # for entries not yet run
        self._exits = {node for entry in entries.values() for node in entry.exits}
        self._sums: dict[GradientEdge, torch.Tensor] = {}  # of gradients, over all stages so far
        self._for_ddp: set[Any] = set()  # nodes of leaves
        self._whole: WholeRun | None = None
        self._is_aborted = False

    def add_gradients(self, key: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of an entry's tensors, once; None for a tensor that was not used."""
        with self._lock:
            if key not in self._missing:
                return
            self._missing.remove(key)
            self._arrived[key] = gradients
            whole = self._whole
        if whole is not None:
            whole.add_gradients(key, gradients)

    def missing(self) -> set[int]:
        """Return the entries whose gradients have not arrived."""
        with self._lock:
            result = set(self._missing)
        return result

    # -- stages -----------------------------------------------------------------------------------

    def run(self) -> Stage | Literal["whole run"] | None:
        """Run entries whose gradients have arrived, if that completes an exit, or the graph.

        One thread at a time may call it; others may add gradients meanwhile.

        Returns:
            The results; None if nothing can be completed yet; ``WHOLE_RUN`` if one run of the
            engine has to do the rest.
        """
        with self._lock:
            is_last = not self._missing
            incomplete = self._union_of("exits", self._missing)
            ready = self._exits - incomplete
            if not self._arrived or not (ready or is_last):
                return None
            chosen = set(self._arrived) if is_last else self._choose(ready)
            if chosen is None or self._has_hooks(chosen):
                return WHOLE_RUN
            arrived = {key: self._arrived.pop(key) for key in chosen}
            self._exits -= ready
        self._run_stage(arrived)
        exits: dict[Any, dict[int, torch.Tensor]] = {node: {} for node in ready}
        for edge in [edge for edge in self._sums if edge.node in ready]:
            exits[edge.node][edge.output_nr] = self._sums.pop(edge)
        if not is_last:
            return Stage(exits, None)
        gradients = {edge.node: gradient for edge, gradient in self._sums.items()}
        self._sums = {}
        return Stage(exits, LeafGradients(gradients, self._for_ddp))

    def _union_of(self, attribute: str, keys: Iterable[int]) -> set[Any]:
        return set().union(*(getattr(self._entries[key], attribute) for key in keys))

    def _choose(self, ready: set[Any]) -> set[int] | None:
        """Return the arrived entries that lead to exits, and all that share a node with them.

        Returns:
            None if an entry whose gradients have not arrived shares a node with them.
        """
        chosen = {key for key in self._arrived if not self._entries[key].exits.isdisjoint(ready)}
        others = set(self._arrived) - chosen
        while True:
            nodes = self._union_of("nodes", chosen)
            sharing = {key for key in others if not self._entries[key].nodes.isdisjoint(nodes)}
            if not sharing:
                break
            chosen |= sharing
            others -= sharing
        if not all(self._entries[key].nodes.isdisjoint(nodes) for key in self._missing):
            return None
        return chosen

    def _has_hooks(self, keys: Iterable[int]) -> bool:
        """Tell whether a leaf, or an exit, that entries lead to has hooks."""
        targets = self._union_of("targets", keys)
        leaves = [edge.node for edge in targets if type(edge.node) is AccumulateGrad]
        exits = {edge.node for edge in targets if type(edge.node) is not AccumulateGrad}
        return hooked_leaves(leaves) or any(map(has_node_hooks, exits))

    def _run_stage(self, arrived: dict[int, Sequence[torch.Tensor | None]]) -> None:
        """Run torch's engine from entries; add the results to the sums. Empties ``arrived``."""
        targets = list(self._union_of("targets", arrived))
        leaves = [edge.node for edge in targets if type(edge.node) is AccumulateGrad]
        self._for_ddp.update(nodes_for_ddp(leaves))
        for _ in arrived.keys() - {ROOTS}:
            with profiled(SEND_NODE):
                pass  # torch's node does no more than return its gradients
        seeds = seeds_of((self._entries[key].edges, each) for key, each in arrived.items())
        arrived.clear()
        if not seeds or not targets:
            return
        results = run_engine(seeds, self._retain, targets)
        del seeds
        for edge, gradient in zip(targets, results, strict=True):
            if gradient is not None:
                total = self._sums.get(edge)
                self._sums[edge] = gradient if total is None else add(total, gradient)

    # -- the rest in one run ----------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Tell whether all gradients have arrived, so that a whole run does not have to wait."""
        return not self._missing

    def run_whole(self, leave: Leave, noted: Noted = nullcontext) -> LeafGradients:
        """Run what no stage has run, and wait for the gradients that it needs.

        Args:
            leave: takes a receive function and its gradients.
            noted: returns a context manager for the wait for a message, given its id.

        Returns:
            The gradients of all leaves, those of earlier stages included.

        Raises:
            RuntimeError: ``abort`` was called, or a node failed.
        """
        with self._lock:
            keys = {*self._arrived, *self._missing}
            entries = {key: self._entries[key] for key in keys}
            root = entries.pop(ROOTS, None)
            targets = self._union_of("targets", keys)
            leaves = list({edge.node for edge in targets if type(edge.node) is AccumulateGrad})
            self._for_ddp.update(nodes_for_ddp(leaves))
            self._whole = WholeRun(
                {} if root is None else seeds_of([(root.edges, self._arrived.pop(ROOTS))]),
                {key: entry.gates for key, entry in entries.items()},
                self._union_of("nodes", keys),
                self._union_of("exits", keys),
                leaves,
                leave,
                noted,
            )
            for key, arrived in self._arrived.items():
                self._whole.add_gradients(key, arrived)
            self._arrived = {}
            if self._is_aborted:  # before the thread of this run had started
                self._whole.abort()
        found = self._whole.run(self._retain, is_captured=bool(self._for_ddp))
        gradients: dict[Any, torch.Tensor] = {e.node: each for e, each in self._sums.items()}
        self._sums = {}
        for node, gradient in found.items():
            gradients[node] = add(gradients[node], gradient) if node in gradients else gradient
        return LeafGradients(gradients, self._for_ddp)

    def abort(self) -> None:
        """End a whole run that waits, or that has yet to begin."""
        with self._lock:
            self._is_aborted = True
            whole = self._whole
        if whole is not None:
            whole.abort()
