"""Make gradient edges in any version of torch."""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import GradientEdge

__all__ = ["edge_at"]

# torch 2.5 and 2.6 have no third field, the token of an owner
_REST: tuple[Any, ...] = (None,) * (len(GradientEdge._fields) - 2)


def edge_at(node: Any, output_nr: int = 0) -> GradientEdge:
    """Return the edge that leads to an output of a node."""
    return GradientEdge(node, output_nr, *_REST)
