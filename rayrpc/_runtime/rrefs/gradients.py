"""Backward passes from values of RRefs."""

from __future__ import annotations

from typing import Any

import torch

from rayrpc._runtime.rrefs.reference import Reference
from rayrpc.errors import RpcError

__all__ = ["run_backward"]

NO_CONTEXT = -1


def run_backward(rref: Reference[Any], context_id: int, retain_graph: bool) -> None:
    """Run the backward pass from a value, at its owner; see ``RRef.backward``."""
    api = rref._get_api()
    if not rref.is_owner():
        if context_id == NO_CONTEXT:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        api.rpc_sync(rref.owner(), run_backward, args=(rref, context_id, retain_graph))
        return
    value: Any = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id == NO_CONTEXT:
        value.backward(retain_graph=retain_graph)
    else:
        api.backward(context_id, [value], retain_graph)
