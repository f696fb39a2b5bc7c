"""The copies of this process's modules that workers keep for their tasks."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, cast

import torch

from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc.rref_proxy import RRef

__all__ = ["ModuleCopies"]


class ModuleCopies:
    """The copies of this process's modules on workers; a copy goes with its module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by module, and the worker's token: the module's fingerprint and the copy
        self._rrefs: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, RRef[Any]]]] = (
            weakref.WeakKeyDictionary()
        )

    def at(self, worker: str, module: Any) -> RRef[Any]:
        """Return a worker's copy of a module as it is now; send the module if it must be."""
        token = current.get_agent().lookup(worker).token
        fingerprint = _fingerprint(module)
        with self._lock:
            copies = self._rrefs.setdefault(module, {})
            if token not in copies or copies[token][0] != fingerprint:
                copies[token] = fingerprint, _copy_to(worker, module)
            return copies[token][1]


def _copy_to(worker: str, module: Any) -> RRef[Any]:
    """Return an RRef to a copy of a module that a worker makes and keeps."""
    agent = current.get_agent()
    copy = Invocation(_itself, (module,))
    return cast("RRef[Any]", agent.caller.remote(agent.lookup(worker), copy, agent.default_timeout))


def _fingerprint(module: Any) -> Any:
    """Return a value that differs after a module's tensors or plain attributes were changed."""
    plain = (bool, int, float, str, tuple, type(None))
    attributes = [
        (name, key, value)
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, plain)
    ]
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return attributes, [(name, t.requires_grad, _checksum(t.detach())) for name, t in tensors]


def _checksum(tensor: torch.Tensor) -> Any:
    """Return a value that depends on all bytes: changes through ``.data`` keep the version."""
    size = tensor.numel() * tensor.element_size()
    identity = (tuple(tensor.shape), tensor._version, tensor.data_ptr())
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or size == 0:
        return identity
    flat = tensor.view(-1).view(torch.int64 if size % 8 == 0 else torch.uint8)
    return (*identity, int(flat.sum()))


def _itself(module: Any) -> Any:
    return module
