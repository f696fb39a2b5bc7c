"""Where a call leaves and enters torch's graph: a send and a receive function for each message.

A tensor that requires grad leaves its pickle by ``join``, while a message of a context is being
encoded; at the receiver it becomes an output of the message's receive function.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "Recorder",
    "begin_message",
    "is_receive",
    "receive",
    "recording",
    "reduce_joined",
    "reduce_parameter",
    "send",
]


class Recorder:
    """Note the tensors of one message.

    Args:
        message_id (int): of the message.
        parameters (bool): parameters take part; else they are sent as leaves, as torch does it
            with those that an object of the user's holds.
    """

    def __init__(self, message_id: int, parameters: bool) -> None:
        self.message_id = message_id
        self.parameters = parameters
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start over: the message is being encoded again."""
        self.tensors.clear()


class _Here(threading.local):
    recorder: Recorder | None = None
    arrived: dict[int, list[torch.Tensor]]

    def __init__(self) -> None:
        self.arrived = {}


_here = _Here()


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Note the tensors that this thread encodes in the context."""
    outer = _here.recorder
    _here.recorder = recorder
    try:
        yield
    finally:
        _here.recorder = outer


def begin_message() -> None:
    """Note that encoding begins."""
    if _here.recorder is not None:
        _here.recorder.begin()


def reduce_joined(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> Any:
    """Return the reduction of a tensor that requires grad, if it is to be joined; else None."""
    recorder = _here.recorder
    if recorder is None:
        return None
    recorder.tensors.append(tensor)
    rebuild, args = reduce(tensor.detach())[:2]
    return _rebuild_joined, (recorder.message_id, rebuild, args)


def reduce_parameter(parameter: Any) -> Any:
    """Return the reduction of a parameter; see ``Recorder``."""
    if _here.recorder is not None and _here.recorder.parameters and parameter.requires_grad:
        _here.recorder.tensors.append(parameter)
        return _rebuild_joined, (_here.recorder.message_id, _itself, (parameter.detach(),))
    return parameter.__reduce_ex__(5)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rebuild_joined(message_id: int, rebuild: Any, args: Any) -> torch.Tensor:
    tensor: torch.Tensor = rebuild(*args).detach()  # no view, so that it can be changed in place
    _here.arrived.setdefault(message_id, []).append(tensor)
    return tensor


class _Send(torch.autograd.Function):
    """Have an edge to each tensor that was sent; it is never run itself."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a send function is an entry, and not run")


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


# their nodes' names, by which programs know them, are made of their classes'
_send_function: Any = type("torch::distributed::autograd::SendRpc", (_Send,), {})
_receive_function: Any = type("torch::distributed::autograd::RecvRpc", (_Receive,), {})
_ReceiveNode: type = _receive_function._backward_cls


def send(tensors: list[torch.Tensor]) -> Any:
    """Return the send function of a message: a node of torch's graph."""
    with torch.enable_grad():
        return _send_function.apply(*tensors).grad_fn


def receive(message_id: int) -> Any:
    """Join what a message brought to a receive function, and return that; None: it brought none.

    Call it in the thread that has decoded the message, right after that.
    """
    tensors = _here.arrived.pop(message_id, None)
    _here.arrived.clear()  # of messages that could not be decoded
    if not tensors:
        return None
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        joined = _receive_function.apply(anchor, tensors)
    node = joined[0].grad_fn
    node.message_id = message_id
    node.count = len(tensors)
    return node


def is_receive(node: Any) -> bool:
    """Tell whether a node is a receive function."""
    return type(node) is _ReceiveNode
