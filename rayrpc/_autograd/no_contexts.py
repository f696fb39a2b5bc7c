"""Groups beside the default one: their calls take no part in contexts of distributed autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from rayrpc._autograd.hook import in_context
from rayrpc._runtime.hooks import Hook, OutgoingCall
from rayrpc._runtime.serialization.recording import TensorRecorder, swap_recorder
from rayrpc.errors import SerializationError

__all__ = ["NoContexts"]


class NoContexts(Hook):
    """Refuse tensors that require grad in calls that are made in a context: no graph has them.

    Args:
        group (str): names the group of the calls.
    """

    of_thread = True

    def __init__(self, group: str) -> None:
        self._group = group

    def wants(self) -> bool:
        return in_context()

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        return _Refusal(self._group)


class _Refusal:
    """Refuse to record the tensors of the message that is encoded in this context."""

    parameters = True

    def __init__(self, group: str) -> None:
        self._group = group

    def __enter__(self) -> None:
        self._outer: TensorRecorder | None = swap_recorder(self)

    def __exit__(self, *exc: object) -> None:
        swap_recorder(self._outer)

    def restart(self) -> None:
        """Begin again: nothing is kept."""

    def record(self, tensor: torch.Tensor, rebuild: Any, args: Any) -> NoReturn:
        raise SerializationError(
            "a tensor that requires grad cannot be sent to a worker of group "
            f"{self._group!r} in a context of distributed autograd, which is of the default group: "
            "detach it, or make the call outside of the context"
        )
