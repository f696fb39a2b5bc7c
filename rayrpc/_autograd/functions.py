"""Where a call leaves and enters torch's graph: a send and a receive function for each message.

A tensor that requires grad leaves its pickle by ``reduce_joined``, while a message of a context is
being encoded; at the receiver it becomes an output of the message's receive function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "Recorder",
    "SendFunction",
    "begin_message",
    "is_receive",
    "receive",
    "reduce_joined",
    "reduce_parameter",
]


class SendFunction:
    """Where the gradients of a message that was sent come in.

    It looks like a node of torch's graph, but is none: torch's engine starts beyond it.

    Args:
        edges (list[GradientEdge]): to each tensor that was sent.
        to (int): id of the worker that it was sent to.
    """

    def __init__(self, edges: list[GradientEdge], to: int) -> None:
        self.to = to
        self._edges = list(edges)  # these keep the graph alive
        self.next_functions = tuple((edge.node, edge.output_nr) for edge in edges)

    def name(self) -> str:
        """Return torch's name for it."""
        return "torch::distributed::autograd::SendRpcBackward"


class Recorder:
    """Note the tensors of one message that this thread encodes in the context of the recorder.

    Args:
        message_id (int): of the message.
        parameters (bool): parameters take part; else they are sent as leaves, as torch does it
            with those that an object of the user's holds.
    """

    def __init__(self, message_id: int, parameters: bool) -> None:
        self.message_id = message_id
        self.parameters = parameters
        self.edges: list[GradientEdge] = []

    def __enter__(self) -> Recorder:
        self._outer = _here.recorder
        _here.recorder = self
        return self

    def __exit__(self, *exc: object) -> None:
        _here.recorder = self._outer

    def join(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> Any:
        """Return the reduction of a tensor that is to be joined, made from that of its values."""
        self.edges.append(_edge_to(tensor))
        return _rebuild_joined, (self.message_id, rebuild, args)


class _Here(threading.local):
    recorder: Recorder | None = None
    arrived: dict[int, list[torch.Tensor]]

    def __init__(self) -> None:
        self.arrived = {}


_here = _Here()


def begin_message() -> None:
    """Note that encoding begins, maybe once more."""
    if _here.recorder is not None:
        _here.recorder.edges.clear()


def reduce_joined(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> Any:
    """Return the reduction of a tensor that requires grad, if it is to be joined; else None."""
    recorder = _here.recorder
    if recorder is None:
        return None
    return recorder.join(tensor, *reduce(tensor.detach())[:2])


def reduce_parameter(parameter: Any) -> Any:
    """Return the reduction of a parameter; see ``Recorder``."""
    recorder = _here.recorder
    if recorder is not None and recorder.parameters and parameter.requires_grad:
        return recorder.join(parameter, _itself, (parameter.detach(),))
    return parameter.__reduce_ex__(5)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rebuild_joined(message_id: int, rebuild: Any, args: Any) -> torch.Tensor:
    tensor: torch.Tensor = rebuild(*args).detach()  # no view, so that it can be changed in place
    _here.arrived.setdefault(message_id, []).append(tensor)
    return tensor


class _Touch(torch.autograd.Function):
    """Have an edge to a tensor of any layout."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this node is never run")


def _edge_to(tensor: torch.Tensor) -> GradientEdge:
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    touch: Any = _Touch  # torch takes a view of the tensor, which a sparse one has not
    with torch.enable_grad():
        owner = touch.apply(tensor).grad_fn
    ((node, number),) = owner.next_functions
    return GradientEdge(node, number, owner)


class _Receive(torch.autograd.Function):
    """Have all tensors that a message brought as outputs; gradients leave here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "A tensor came here by RPC: run torch.distributed.autograd.backward(context_id, roots) "
            "instead of a local backward pass, which ends here."
        )


# a node's name, by which programs know it, is made of its class's
_receive_function: Any = type("torch::distributed::autograd::RecvRpc", (_Receive,), {})
_ReceiveNode: type = _receive_function._backward_cls
# without what Function.apply does for functorch, which takes longer than all the rest
_apply: Any = super(torch.autograd.Function, _receive_function).apply
_anchor = torch.empty(0, requires_grad=True)  # torch makes a node only of what requires grad


def receive(message_id: int) -> Any:
    """Join what a message brought to a receive function, and return that; None: it brought none.

    Call it in the thread that has decoded the message, right after that.
    """
    tensors = _here.arrived.pop(message_id, None)
    _here.arrived.clear()  # of messages that could not be decoded
    if not tensors:
        return None
    if torch.is_grad_enabled():
        joined = _apply(_anchor, tensors)
    else:
        with torch.enable_grad():
            joined = _apply(_anchor, tensors)
    node = joined[0].grad_fn
    node.message_id = message_id
    node.count = len(tensors)
    return node


def is_receive(node: Any) -> bool:
    """Tell whether a node is a receive function."""
    return type(node) is _ReceiveNode
