"""A call that a thread waits for: its reply, or what ends the wait."""

from __future__ import annotations

from collections.abc import Callable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Pending
from rayrpc._runtime.call_errors import cancelled, shut_down
from rayrpc._runtime.open_call import Request

__all__ = ["await_reply"]

# How often a blocking call checks whether its own worker was shut down, or it was cancelled.
POLL_SECONDS = 0.5
# Polls after the loss of a peer in which a reply that arrived before may be read.
LOSS_POLLS = 2


def await_reply(
    request: Request,
    pending: Pending,
    death_of: Callable[[Member], BaseException | None],
    is_closed: Callable[[], bool],
    unwanted: Callable[[], bool] | None,
) -> Frame:
    """Return the reply to a call.

    Args:
        request: the call.
        pending: where the reply will be.
        death_of: returns why a member is gone, if it is.
        is_closed: tells whether this worker was shut down.
        unwanted: see ``StartedCall``.

    Raises:
        TimeoutError: it did not arrive in time, or is unwanted.
        CallError: the call failed, or was cancelled.
    """
    deadline = Deadline(request.timeout)
    deaths = 0
    while True:
        try:
            return pending.wait(deadline.within(POLL_SECONDS))
        except TimeoutError:
            if is_closed():
                raise shut_down() from None
            if request.is_cancelled:
                raise cancelled(request.func, request.to.name) from None
            death = death_of(request.to)
            if death is not None:  # the transport may detect it much later
                deaths += 1
                if deaths > LOSS_POLLS:
                    raise death from None
            if deadline.expired or (unwanted is not None and unwanted()):
                raise
