"""Where a call leaves and enters torch's graph: a send and a receive function for each message.

While a message of a context is encoded, a ``Recorder`` collects an edge to each of its tensors
that require grad; the message's send function is made of these. At the receiver the tensors become
outputs of the message's receive function.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayrpc._runtime.serialization.recording import TensorRecorder, swap_recorder

__all__ = ["Recorder", "SendFunction", "attach_received", "is_receive"]


class SendFunction:
    """Where the gradients of a sent message come in.

    It has the attributes of a node of torch's graph, but is none: torch's engine starts at its
    edges.

    Args:
        edges (list[GradientEdge]): one to each of the message's tensors.
        to (int): id of the worker that the message was sent to.
    """

    def __init__(self, edges: list[GradientEdge], to: int) -> None:
        self.to = to
        self._edges = list(edges)  # these keep the graph alive
        self.next_functions = tuple((edge.node, edge.output_nr) for edge in edges)

    def name(self) -> str:
        """Return torch's name for it."""
        return "torch::distributed::autograd::SendRpcBackward"


class Recorder:
    """Record the tensors of the message that this thread encodes while it is in this context.

    Args:
        message_id (int): of the message.
        parameters (bool): record parameters; else they are sent as leaves, as torch does with
            those that a user's object holds.
    """

    def __init__(self, message_id: int, parameters: bool) -> None:
        self.message_id = message_id
        self.parameters = parameters
        #: one to each recorded tensor
        self.edges: list[GradientEdge] = []

    def __enter__(self) -> Recorder:
        self._outer: TensorRecorder | None = swap_recorder(self)
        return self

    def __exit__(self, *exc: object) -> None:
        swap_recorder(self._outer)

    def restart(self) -> None:
        """Drop the edges: the message is encoded again."""
        self.edges.clear()

    def record(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> Any:
        """Record a tensor, and return its reduction, made from that of its values."""
        self.edges.append(_edge_to(tensor))
        return _rebuild_recorded, (self.message_id, rebuild, args)


class _ThreadState(threading.local):
    received: dict[int, list[torch.Tensor]]  # by message, until ``attach_received``

    def __init__(self) -> None:
        self.received = {}


_thread = _ThreadState()


def _rebuild_recorded(message_id: int, rebuild: Any, args: Any) -> torch.Tensor:
    tensor: torch.Tensor = rebuild(*args).detach()  # no view, so that it can be changed in place
    _thread.received.setdefault(message_id, []).append(tensor)
    return tensor


class _EdgeOnly(torch.autograd.Function):
    """Have an edge to a tensor of any layout; never run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this node is never run")


def _edge_to(tensor: torch.Tensor) -> GradientEdge:
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    function: Any = _EdgeOnly  # torch takes a view of the tensor, which a sparse one has not
    with torch.enable_grad():
        owner = function.apply(tensor).grad_fn
    ((node, number),) = owner.next_functions
    return GradientEdge(node, number, owner)


class _Receive(torch.autograd.Function):
    """Have all tensors of a received message as outputs; gradients leave here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "A tensor came here by RPC: run torch.distributed.autograd.backward(context_id, roots) "
            "instead of a local backward pass, which ends here."
        )


# a node's name, by which programs find it, is made of its class's
_receive_function: Any = type("torch::distributed::autograd::RecvRpc", (_Receive,), {})
_ReceiveNode: type = _receive_function._backward_cls
# without what Function.apply does for functorch, which takes longer than all the rest
_apply: Any = super(torch.autograd.Function, _receive_function).apply
_anchor = torch.empty(0, requires_grad=True)  # torch makes a node only of what requires grad


def attach_received(message_id: int) -> Any:
    """Make the recorded tensors of a message outputs of a receive function.

    Call it in the thread that has decoded the message, right after that.

    Returns:
        The receive function's node; None if the message had no recorded tensors.
    """
    tensors = _thread.received.pop(message_id, None)
    _thread.received.clear()  # of messages that could not be decoded
    if not tensors:
        return None
    if torch.is_grad_enabled():
        outputs = _apply(_anchor, tensors)
    else:
        with torch.enable_grad():
            outputs = _apply(_anchor, tensors)
    node = outputs[0].grad_fn
    node.message_id = message_id
    node.count = len(tensors)
    return node


def is_receive(node: Any) -> bool:
    """Tell whether a node is a receive function."""
    return type(node) is _ReceiveNode
