"""The recorder of the message that a thread encodes: how autograd takes part in the pickling.

The codec and the reducers of tensors check here whether a tensor that requires grad is recorded,
which replaces its reduction. Without a recorder such a tensor is sent as a leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = [
    "TensorRecorder",
    "begin_message",
    "reduce_parameter",
    "reduce_recorded",
    "swap_recorder",
]


class TensorRecorder(Protocol):
    """Records the tensors of one message that require grad."""

    #: parameters are recorded, too; else they are sent as leaves
    parameters: bool

    def restart(self) -> None:
        """Drop what was recorded: the message is encoded again."""

    def record(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> Any:
        """Record a tensor, and return its reduction.

        Args:
            tensor: requires grad.
            rebuild, args: the reduction of its values.
        """


class _ThreadState(threading.local):
    recorder: TensorRecorder | None = None


_thread = _ThreadState()


def swap_recorder(recorder: TensorRecorder | None) -> TensorRecorder | None:
    """Set this thread's recorder, and return the one that it had.

    Args:
        recorder: None: record nothing.
    """
    outer = _thread.recorder
    _thread.recorder = recorder
    return outer


def begin_message() -> None:
    """Restart this thread's recorder: encoding begins, perhaps once more."""
    recorder = _thread.recorder
    if recorder is not None:
        recorder.restart()


def reduce_recorded(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> Any:
    """Return the reduction of a tensor that requires grad, or None if it is not recorded.

    Args:
        tensor: requires grad.
        reduce: reduces a tensor that requires no grad.
    """
    recorder = _thread.recorder
    if recorder is None:
        return None
    return recorder.record(tensor, *reduce(tensor.detach())[:2])


def reduce_parameter(parameter: Any) -> Any:
    """Return the reduction of a ``torch.nn.Parameter``."""
    recorder = _thread.recorder
    if recorder is not None and recorder.parameters and parameter.requires_grad:
        return recorder.record(parameter, _itself, (parameter.detach(),))
    return parameter.__reduce_ex__(5)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
