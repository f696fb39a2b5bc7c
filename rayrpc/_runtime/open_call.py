"""The caller's record of a call under way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayrpc._concurrency.outcome import Error, Outcome
from rayrpc._concurrency.reader import is_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Pending
from rayrpc._runtime.call_errors import name_of
from rayrpc._runtime.current_call import current_call
from rayrpc._runtime.hooks import OutgoingCall
from rayrpc._runtime.served_call import ServedCall

__all__ = ["OpenCall", "Request", "Send"]

Done = Callable[[Outcome[Any]], object]


class Send(Protocol):
    """Sends frames to members, this worker among them."""

    def __call__(self, peer: Member, frame: Frame) -> Pending:
        """Send a frame and expect its reply."""


class Completer(Protocol):
    """Completes calls; the ``Caller``."""

    threads: ThreadCache

    def finish(self, call: OpenCall, outcome: Outcome[Frame]) -> None:
        """Complete a call with the outcome of its transport."""


@dataclass(slots=True)
class Request:
    """A call under way; it does not hold the frame, whose buffers may be large.

    Args:
        to: the callee.
        id: of the call.
        timeout: in seconds; None: none.
        lent: handles that must live until the reply is there.
        call: its record for hooks; None if no hook takes part.
        keeps_type: an error is raised by ``to_here``; see ``remote_errors``.
        func: what it runs; None: it fetches a value.
        thread: ident of the thread that waits for it; 0: none does.
        since: ``time.monotonic()`` when it was made.
        parent: the call for which the function runs that makes it; None: there is none.
        is_cancelled: the thread that waits for it is to stop.
    """

    to: Member
    id: int
    timeout: float | None
    lent: tuple[Any, ...] = ()
    call: OutgoingCall | None = None
    keeps_type: bool = False
    func: object = None
    thread: int = 0
    since: float = field(default_factory=time.monotonic)
    parent: ServedCall | None = field(default_factory=current_call.get)
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that completes by callback.

    Args:
        caller: made it.
        request: its request.
        done: takes the outcome, once.
        on_created: for ``remote``: called when the owner has answered, in time or late.
    """

    caller: Completer
    request: Request
    done: Done
    on_created: Callable[[], None] | None = None
    returned: object = None  # the Future that the user got, if hooks have replaced it
    has_outcome: bool = False  # ``finish`` follows
    finishers: list[object] = field(default_factory=list)  # the first one finishes
    _ends: list[bool] = field(default_factory=list)  # the first one counts

    def end(self, by_reply: bool) -> bool:
        """End it by its reply, or without; return False if it has ended in the other way.

        It may be called again: an interrupt may come between the end and what follows.
        """
        self._ends.append(by_reply)
        return self._ends[0] == by_reply

    def failed(self, error: BaseException) -> Error:
        """Return the outcome of a call with an error, which is logged if it is never read."""
        name = name_of(self.request.func, self.request.to.name)
        return Error(error, None, name[:1].upper() + name[1:])

    @property
    def future(self) -> Any:
        """The Future that the user waits for; None if that is something else, or not known."""
        return self.done.args[0] if isinstance(self.done, functools.partial) else None

    @property
    def has_failed(self) -> bool:
        """Tell whether it has ended without its reply."""
        return bool(self._ends) and not self._ends[0]

    def on_reply(self, outcome: Outcome[Frame]) -> None:
        """Take the outcome from a thread of the transport."""
        self.has_outcome = True
        if self.is_cheap(outcome) or is_reader():
            self.caller.finish(self, outcome)
        else:
            self.caller.threads.submit(lambda: self.caller.finish(self, outcome))

    def is_cheap(self, outcome: Outcome[Frame]) -> bool:
        """Return whether any thread may finish it, also one that may be interrupted.

        The reply to ``remote`` has nothing to decode, and no user's code waits for it.
        """
        return self.on_created is not None and not _may_run_users_code(outcome)


def _may_run_users_code(outcome: Outcome[Frame]) -> bool:
    if isinstance(outcome, Error):
        return False
    reply = outcome.value
    return reply.kind is not Kind.VALUE or bool(reply.control)
