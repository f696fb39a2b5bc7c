"""What the graph of compiled code does: whether it calls RPC, or an interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.jit._state import _get_python_class

__all__ = ["calls_interface", "calls_rpc"]

_OPERATORS = frozenset(("aten::dist_backward", "aten::get_gradients"))


def calls_rpc(graph: Any) -> bool:
    """Tell whether an inlined graph has operators of RPC, or values that are or hold RRefs."""
    return any(_holds_rref(value.type()) for value in graph.inputs()) or any(
        node.kind().startswith("prim::rpc_")
        or node.kind() in _OPERATORS
        or any(_holds_rref(value.type()) for value in node.outputs())
        for node in _nodes(graph)
    )


def calls_interface(graph: Any) -> bool:
    """Tell whether an inlined graph calls modules of which only the interface is known."""
    return any(
        node.kind() == "prim::CallMethod" and next(node.inputs()).type().kind() == "InterfaceType"
        for node in _nodes(graph)
    )


def _holds_rref(kind: Any) -> bool:
    name = kind.kind()
    if name == "ClassType" and _get_python_class(kind.qualified_name()) is None:
        return False  # a module: RRefs in it are values of other nodes
    return name == "RRefType" or any(map(_holds_rref, kind.containedTypes()))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        if node.hasAttribute("Subgraph"):  # of ``torch.jit.fork``, in which no call is inlined
            forked = node.g("Subgraph").copy()
            torch._C._jit_pass_inline(forked)
            yield from _nodes(forked)
