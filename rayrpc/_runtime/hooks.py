"""Hooks, which take part in calls: profiling, metrics, distributed autograd.

Each is a ``Hook`` in a file of its own, registered on the agent.  A call in which no hook takes
part costs one check of a list.

    caller                                          callee
    before_send, encode, after_encode
    make_future ── request with meta ─────────────> before_run (on_undecodable if decoding fails)
    after_send                                      the user's function; before_resume: a coroutine
                                                    before_reply, encode, after_encode_reply
                                                    (after_kept if the value stays here)
    on_result <─────────── reply with meta ────────
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.messages import EMPTY, Meta, Payload, size_of
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import WorkerDiedError

__all__ = ["Hook", "IncomingCall", "OutgoingCall", "all_of", "hooks_in", "meta_of"]


@dataclass(slots=True)
class OutgoingCall:
    """A call at its caller.

    Args:
        mode (str): "sync", "async", "remote" or "fetch" (which runs nothing).
        to (WorkerInfo): the callee.
        src (WorkerInfo): the caller.
        invocation (Invocation): what to run.
        meta (dict): entries that hooks send with the request, by hook name.
        notes (dict): state of the hooks until ``on_result``, by hook name.
        payload (Payload | None): the encoded invocation, during ``after_encode``.
    """

    mode: str
    to: WorkerInfo
    src: WorkerInfo
    invocation: Invocation
    meta: Meta = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    payload: Payload | None = None

    @property
    def size(self) -> int:
        """The bytes of the encoded invocation, during ``after_encode``."""
        return 0 if self.payload is None else len(self.payload.data) + size_of(self.payload)


@dataclass(slots=True)
class IncomingCall:
    """A call at its callee.

    Args:
        src (int): id of the caller.
        invocation (Invocation | None): what to run; None once it has run, and for a fetch.
        meta (dict): entries of the caller's hooks.
        reply_meta (dict): entries that hooks send with the reply, by hook name.
        notes (dict): state of the hooks until the reply is sent, by hook name.
        arrived (float), taken (float): ``time.monotonic()`` when it was received, and when a thread
            took it; 0: not known.
    """

    src: int
    invocation: Invocation | None
    meta: Meta
    reply_meta: Meta = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    arrived: float = 0.0
    taken: float = 0.0


class Hook:
    """Take part in calls; override what is needed."""

    #: names its entries in ``meta``
    name = ""
    #: blocking calls need a Future too, for ``after_send``
    needs_future = False
    #: what it ``wants`` depends on the thread that makes a call
    of_thread = False
    #: it takes part in calls that are made in one of these ways
    modes = frozenset({"sync", "async", "remote", "fetch"})

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Handle the loss of the worker with this id, which left or died."""

    def close(self) -> None:
        """Handle the shutdown of the agent."""

    def debug_info(self) -> dict[str, str]:
        """Return counters for ``_get_debug_info``, as text."""
        return {}

    def wants(self) -> bool:
        """Tell whether this hook takes part in calls that this thread makes now, of its modes."""
        return True

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        """Prepare a request; the returned context spans its encoding."""
        return contextlib.nullcontext()

    def after_encode(self, call: OutgoingCall) -> None:
        """Add to ``call.meta``; the request is encoded, and not sent yet."""

    def make_future(self, call: OutgoingCall) -> Any:
        """Return the Future for a call; None: a plain one will do."""
        return None

    def after_send(self, call: OutgoingCall, future: Any) -> Any:
        """Return the Future for the user: ``future``, which completes with the call, or another."""
        return future

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Accept a call with meta of this hook; the returned context spans the user's function."""
        return contextlib.nullcontext()

    def on_undecodable(self, src: int, meta: Any) -> None:
        """Handle this hook's meta of a call from worker ``src`` that could not be decoded."""

    def before_resume(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Return the context of the next step of a coroutine."""
        return contextlib.nullcontext()

    def before_reply(self, call: IncomingCall) -> AbstractContextManager[Any]:
        """Prepare a reply with a value; the returned context spans its encoding."""
        return contextlib.nullcontext()

    def after_encode_reply(self, call: IncomingCall) -> None:
        """Add to ``call.reply_meta``; the reply is encoded, and not sent yet."""

    def after_kept(self, call: IncomingCall) -> None:
        """Add to ``call.reply_meta``; the worker has kept the value of a ``remote`` call."""

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        """Return the value for the user; ``meta`` is what this hook sent with the reply."""
        return value


def all_of(steps: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return one context that enters all; most often there is one."""
    return steps[0] if len(steps) == 1 else _entered_in_order(steps)


@contextlib.contextmanager
def _entered_in_order(steps: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for step in steps:
            stack.enter_context(step)
        yield


def hooks_in(meta: Meta, hooks: Sequence[Hook]) -> list[Hook]:
    """Return the hooks that have an entry in a frame's ``meta``."""
    return [hook for hook in hooks if hook.name in meta]


def meta_of(call: OutgoingCall, hooks: list[Hook], payload: Payload = EMPTY) -> Meta | None:
    """Return what the hooks send with an encoded call."""
    call.payload = payload
    for hook in hooks:
        hook.after_encode(call)
    call.payload = None  # its buffers may be large
    return call.meta or None
