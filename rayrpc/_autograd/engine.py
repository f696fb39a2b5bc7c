"""Run torch's autograd engine; only this module uses the engine's private names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rayrpc._autograd.accumulate import add

__all__ = ["AccumulateGrad", "profiled", "run_engine", "run_id", "seeds_of"]

_one = torch.ones((), requires_grad=True)
_grad_fn: Any = _one.view(1).grad_fn
#: the class of the nodes that accumulate the gradients of leaves
AccumulateGrad: Any = type(_grad_fn.next_functions[0][0])

_run_backward: Any = torch.autograd.graph._engine_run_backward

Edges = Iterable[tuple[Mapping[int, GradientEdge], Sequence[torch.Tensor | None]]]


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a context manager that records an event in this thread's profiler, if one runs."""
    if torch.autograd._profiler_enabled():
        event: AbstractContextManager[object] = torch.autograd.profiler.record_function(name)
        return event
    return contextlib.nullcontext()


def run_id() -> int:
    """Return the id of the engine's run that this thread is in; -1 if it is in none."""
    number: int = torch._C._current_graph_task_id()
    return number


def seeds_of(entries: Edges) -> dict[GradientEdge, torch.Tensor]:
    """Return the gradients that a run of the engine starts with, by edge.

    Args:
        entries: edges, and the gradients at them, both by the tensor's number in its message.
    """
    seeds: dict[GradientEdge, torch.Tensor] = {}
    for edges, gradients in entries:
        for slot, edge in edges.items():
            gradient = gradients[slot]
            if edge.node is not None and gradient is not None:
                seeds[edge] = add(seeds[edge], gradient) if edge in seeds else gradient
    return seeds


def run_engine(
    seeds: Mapping[GradientEdge, torch.Tensor], retain: bool, targets: Sequence[GradientEdge] | None
) -> Sequence[torch.Tensor | None]:
    """Run torch's engine.

    Args:
        seeds: the gradients to start with, by edge.
        retain: keep the graph for another run.
        targets: the edges at which to stop, and whose gradients to return; None: run all nodes,
            those of leaves included.

    Returns:
        The gradients at ``targets``; None for a target that no gradient reached.
    """
    # torch.autograd.grad calls it, too, but only after checks that take as long as a small pass
    results: Sequence[torch.Tensor | None] = _run_backward(
        tuple(seeds),
        tuple(seeds.values()),
        retain,
        create_graph=False,
        inputs=() if targets is None else tuple(targets),
        allow_unreachable=True,
        accumulate_grad=targets is None,
    )
    return results
