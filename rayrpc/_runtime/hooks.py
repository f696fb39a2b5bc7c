"""Concerns that accompany calls: profiling, metrics, distributed autograd.

Each is a ``Hook`` in a file of its own, registered on the agent.  The caller and the callee run
the hooks that want a call; a call that none wants pays for one look at a list.

    caller:  send ──> (frame with meta) ──> callee:  receive, the user's function, reply
    caller:  result <── (reply with meta) <──
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import WorkerDiedError

__all__ = ["Hook", "IncomingCall", "OutgoingCall", "all_of"]


@dataclass(slots=True)
class OutgoingCall:
    """A call at its caller.

    Args:
        mode (str): "sync", "async", "remote" or "fetch" (which runs nothing).
        to (WorkerInfo): the callee.
        src (WorkerInfo): the caller.
        invocation (Invocation): what to run.
        meta (dict): what hooks send along, by hook name.
        notes (dict): what hooks remember until the result is there, by hook name.
    """

    mode: str
    to: WorkerInfo
    src: WorkerInfo
    invocation: Invocation
    meta: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class IncomingCall:
    """A call at its callee.

    Args:
        src (int): id of the caller.
        invocation (Invocation | None): what to run; None once it has run, and for a fetch.
        meta (dict): what the caller's hooks sent.
        reply_meta (dict): what hooks send back, by hook name.
        notes (dict): what hooks remember until the reply is sent, by hook name.
    """

    src: int
    invocation: Invocation | None
    meta: dict[str, Any]
    reply_meta: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class Hook:
    """Take part in calls; override what is needed."""

    #: names its entries in ``meta``
    name = ""
    #: a blocking call has to have a Future, too
    needs_future = False

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Note that the worker with this id left or died."""

    def close(self) -> None:
        """Note that the agent is shut down."""

    def debug_info(self) -> dict[str, str]:
        """Return counters for ``_get_debug_info``, as text."""
        return {}

    def wants(self) -> bool:
        """Tell whether calls made by this thread right now concern this hook."""
        return True

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        """Prepare a call; the context is entered while it is being sent."""
        return contextlib.nullcontext()

    def after_encode(self, call: OutgoingCall) -> None:
        """Note that the call's message is complete, and about to be sent."""

    def make_future(self, call: OutgoingCall) -> Any:
        """Return the Future for a call, if it is to be a special one."""
        return None

    def after_send(self, call: OutgoingCall, future: Any) -> Any:
        """Return the Future to give to the user instead of ``future``, which ends with the call."""
        return future

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Accept a call that has this hook's meta; the context spans the user's function."""
        return contextlib.nullcontext()

    def on_undecodable(self, src: int, meta: Any) -> None:
        """Note a call from a worker that had this hook's meta, but could not be decoded."""

    def before_resume(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Return the context of one more step of the user's function, if it is a coroutine."""
        return contextlib.nullcontext()

    def before_reply(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Prepare a reply with a value; the context spans its encoding."""
        return contextlib.nullcontext()

    def after_encode_reply(self, call: IncomingCall) -> None:
        """Note that the reply is complete, and about to be sent."""

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        """Return the value to give to the user instead of ``value``."""
        return value


def all_of(steps: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return one context for those of all hooks; most often there is one."""
    return steps[0] if len(steps) == 1 else _entered_in_turn(steps)


@contextlib.contextmanager
def _entered_in_turn(steps: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for step in steps:
            stack.enter_context(step)
        yield
