"""A message's send and receive functions: where gradients enter and leave a worker's graph.

While a message of a context is encoded, a ``Recorder`` makes a gate for each of its tensors that
require grad: the output of a node that leads to the tensor. The gates make up the message's send
function. At the receiver the tensors become outputs of the message's receive function.

Torch's engine runs gates and receive functions in a ``whole_run`` only: there gradients come in at
the gates, and leave at the receive functions. In a stage (``graph.py``) the engine starts behind
the gates, and stops before the receive functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from rayrpc._runtime.serialization.recording import TensorRecorder, swap_recorder
from rayrpc.errors import SerializationError

__all__ = [
    "ANCHOR",
    "Recorder",
    "Refusal",
    "Run",
    "SEND_NODE",
    "SendFunction",
    "attach_received",
    "is_receive",
    "running",
]


#: torch's name of the node where the gradients of a sent message come in
SEND_NODE = "torch::distributed::autograd::SendRpcBackward"


class Run(Protocol):
    """What gates and receive functions need of a run of torch's engine."""

    def arrived(self, message_id: int, slot: int) -> torch.Tensor | None:
        """Return the gradient of a sent tensor."""

    def leave(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a receive function."""


class SendFunction:
    """Where the gradients of a sent message come in.

    It has the attributes of a node of torch's graph, but is no node: each tensor has its own gate.

    Args:
        gates (list[Tensor]): the gate of each of the message's tensors.
        to (int): id of the worker that the message was sent to.
    """

    def __init__(self, gates: list[torch.Tensor], to: int) -> None:
        self.to = to
        self.gates = list(gates)  # these keep the graph alive
        self.next_functions = tuple(_node_of(gate).next_functions[0] for gate in gates)

    def name(self) -> str:
        """Return torch's name for a send function."""
        return SEND_NODE


def _node_of(tensor: torch.Tensor) -> Any:
    return tensor.grad_fn


class Recorder:
    """Record the tensors of the message that this thread encodes within the ``with`` statement.

    Args:
        message_id (int): the message's id.
        parameters (bool): record parameters; else they are sent as leaves, as torch sends the
            parameters in a user's object.
    """

    def __init__(self, message_id: int, parameters: bool) -> None:
        self.message_id = message_id
        self.parameters = parameters
        #: one for each recorded tensor
        self.gates: list[torch.Tensor] = []

    def __enter__(self) -> Recorder:
        self._outer: TensorRecorder | None = swap_recorder(self)
        return self

    def __exit__(self, *exc: object) -> None:
        swap_recorder(self._outer)

    def restart(self) -> None:
        """Drop the gates: the message is encoded again."""
        self.gates.clear()

    def record(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> Any:
        """Record a tensor, and return its reduction, made from the reduction of its values."""
        self.gates.append(_make_gate(tensor, self.message_id, len(self.gates)))
        return _rebuild_recorded, (self.message_id, rebuild, args)


class Refusal(Recorder):
    """Refuse to record tensors of the message that is encoded within the ``with`` statement.

    Args:
        group (str): the group whose context the thread is in.
        other (str): the group whose worker is called.
    """

    def __init__(self, group: str, other: str) -> None:
        super().__init__(0, parameters=True)
        self._group = group
        self._other = other

    def record(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> NoReturn:
        raise SerializationError(
            f"a tensor that requires grad cannot be sent to a worker of group {self._other!r} in a "
            f"context of distributed autograd of group {self._group!r}: detach it, or make the "
            "call outside of the context"
        )


class _ThreadState(threading.local):
    received: dict[int, list[torch.Tensor]]  # by message, until ``attach_received``
    run: Run | None = None

    def __init__(self) -> None:
        self.received = {}


_thread = _ThreadState()
# Runs by the ids of their receive functions, which the engine may run in other threads.
_runs: dict[int, Run] = {}


class running:
    """Have gates and receive functions use a run within the ``with`` statement.

    Args:
        run (Run): the run, which this thread begins.
        exits (Iterable): the run's receive functions, which the engine may run in other threads.
    """

    def __init__(self, run: Run, exits: Iterable[Any]) -> None:
        self._run = run
        self._keys = [id(node) for node in exits]

    @staticmethod
    def here() -> Run | None:
        """Return the run of this thread."""
        return _thread.run

    def __enter__(self) -> None:
        self._outer = _thread.run
        _thread.run = self._run
        _runs.update(dict.fromkeys(self._keys, self._run))

    def __exit__(self, *exc: object) -> None:
        _thread.run = self._outer
        for key in self._keys:
            _runs.pop(key, None)


def _rebuild_recorded(message_id: int, rebuild: Any, args: Any) -> torch.Tensor:
    tensor: torch.Tensor = rebuild(*args).detach()  # no view, so that it can be changed in place
    _thread.received.setdefault(message_id, []).append(tensor)
    return tensor


class _Gate(torch.autograd.Function):
    """Lead to a sent tensor, whatever the tensor's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        assert _thread.run is not None  # the engine runs a gate only in a ``Run``
        return _thread.run.arrived(ctx.message_id, ctx.slot)


# The base class's ``apply``: what Function.apply does for functorch takes longer than the rest.
_apply_gate: Any = super(torch.autograd.Function, _Gate).apply


def _make_gate(tensor: torch.Tensor, message_id: int, slot: int) -> torch.Tensor:
    """Return a tensor's gate: the output of a node that leads to the tensor."""
    if torch.is_grad_enabled():
        gate = _apply_gate(tensor)
    else:
        with torch.enable_grad():
            gate = _apply_gate(tensor)
    node = gate.grad_fn
    node.message_id, node.slot = message_id, slot
    made: torch.Tensor = gate
    return made


class _Receive(torch.autograd.Function):
    """Have the tensors of a received message as outputs, whose gradients leave here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = _thread.run or _runs.get(id(ctx))
        if run is not None:
            run.leave(ctx, gradients)
            return None, None
        raise RuntimeError(
            "A tensor came here by RPC: run torch.distributed.autograd.backward(context_id, roots) "
            "instead of a local backward pass, which ends here."
        )


# programs find the node by its name, which torch makes from the class's name
_receive_function: Any = type("torch::distributed::autograd::RecvRpc", (_Receive,), {})
_ReceiveNode: type = _receive_function._backward_cls
_apply: Any = super(torch.autograd.Function, _receive_function).apply
#: an input that requires grad: without one, torch makes no node
ANCHOR = torch.empty(0, requires_grad=True)


def attach_received(message_id: int) -> Any:
    """Make the recorded tensors of a message outputs of a receive function.

    Call it in the thread that has decoded the message, right after decoding.

    Returns:
        The receive function's node; None if the message had no recorded tensors.
    """
    tensors = _thread.received.pop(message_id, None)
    _thread.received.clear()  # of messages that could not be decoded
    if not tensors:
        return None
    if torch.is_grad_enabled():
        outputs = _apply(ANCHOR, tensors)
    else:
        with torch.enable_grad():
            outputs = _apply(ANCHOR, tensors)
    node = outputs[0].grad_fn
    node.message_id = message_id
    node.count = len(tensors)
    node.made_at = RemovableHandle.next_id  # the node has no hooks while this is the next id
    return node


def is_receive(node: Any) -> bool:
    """Tell whether a node is a receive function."""
    return type(node) is _ReceiveNode
