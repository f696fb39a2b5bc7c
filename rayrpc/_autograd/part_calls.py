"""The calls between the parts of a backward pass, and their replies.

The parts are in ``participant`` and ``leader``; the call that begins one, ``begin_part``, is in
``participant``.
"""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from rayrpc._autograd.hook import serving_contexts
from rayrpc._autograd.passes import Gradients
from rayrpc.errors import RpcError

__all__ = [
    "ENDED",
    "NEEDS_GRADIENTS",
    "PENDING",
    "Reply",
    "abort_part",
    "completed",
    "propagate",
    "returns_future",
]

#: the reply to a request with gradients: gradients for its sender, and a status for the leader
Reply = tuple[Gradients, int]
# The status of a part: a later reply will report its end; it needs gradients from the leader to go
# on; it has ended.  (Numbers, as an enum, or a class for the reply, would take longer to pickle
# than the rest of the reply.)
PENDING, NEEDS_GRADIENTS, ENDED = range(3)


def completed(reply: Reply) -> Future[Reply]:
    """Return a completed Future of a reply."""
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future


def returns_future(func: Any) -> Any:
    """Mark a function whose Future is the reply, as ``async_execution`` does, without a wrapper."""
    func._wrapped_async_rpc_function = func
    return func


@returns_future
def propagate(
    context_id: int, pass_id: int, gradients: Gradients, source: int, is_needed: bool
) -> Future[Reply]:
    """Process gradients that ``Participant._send_gradients`` sent to this worker's part."""
    contexts = serving_contexts()
    part = contexts.find_context(context_id).passes.find(pass_id, gradients)
    if part is not None:
        reply: Future[Reply] = part.process_request(gradients, source)
        return reply
    if is_needed:
        raise RpcError(f"the part of worker {contexts.agent.info.id} in the pass has ended")
    return completed(({}, PENDING))


def abort_part(context_id: int, pass_id: int, error: RpcError) -> None:
    """End this worker's part of a pass with an error, now or when it begins.

    Args:
        context_id, pass_id: as for ``begin_part``.
        error: the error that ends the part.
    """
    context = serving_contexts().get(context_id)
    if context is not None:
        context.passes.abort(pass_id, error)
