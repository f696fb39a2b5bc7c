"""Record when each call of this worker is made, sent, received, run and answered.

The hook is among the agent's hooks only while a trace is recorded: a call that is not recorded pays
nothing.  ``trace_file`` makes one picture of what all workers have recorded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rayrpc._concurrency.clocks import clock
from rayrpc._observe.report import name_of
from rayrpc._observe.trace_file import Made, Part, Served
from rayrpc._protocol.membership import Member
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall
from rayrpc._runtime.invocation import prompt

__all__ = ["TraceHook", "clock_here", "start", "stop", "trace_until_shutdown"]

logger = logging.getLogger(__name__)

# Of the calls that a worker makes, and of those that it serves; later ones are counted.
MOST_CALLS = 500_000


class TraceHook(Hook):
    """Record the calls of a worker.

    Args:
        member (Member): the worker.
        group (str): see ``Part``.
        run (str): names the trace that it is for.
    """

    name = "trace"

    def __init__(self, member: Member, group: str = "", run: str = "") -> None:
        self.run = run
        self.part = Part(member.name, member.node, member.id, os.getpid(), group=group)
        self._next_number = itertools.count(1).__next__

    def snapshot(self) -> Part:
        """Return what was recorded so far; calls under way may add to the hook's own."""
        part = self.part
        return dataclasses.replace(
            part, made=list(part.made), served=list(part.served), threads=dict(part.threads)
        )

    def _thread(self) -> int:
        ident = threading.get_ident()
        self.part.threads[ident] = threading.current_thread().name
        return ident

    def _add(self, records: list[Any], record: Any) -> None:
        if len(records) < MOST_CALLS:
            records.append(record)
        else:
            self.part.dropped += 1

    # -- at the caller ------------------------------------------------------------------------

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        made = Made(
            number=self._next_number(),
            mode=call.mode,
            function=name_of(call.invocation),
            to=call.to.id,
            thread=self._thread(),
            began=time.monotonic(),
        )
        call.notes[self.name] = made
        self._add(self.part.made, made)
        return contextlib.nullcontext()

    def after_encode(self, call: OutgoingCall) -> None:
        made: Made = call.notes[self.name]
        made.encoded = time.monotonic()
        made.bytes = call.size
        call.meta[self.name] = made.number

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        made: Made | None = call.notes.get(self.name)
        if made is not None:
            made.end_thread = self._thread()
            made.ended = time.monotonic()
        return value

    # -- at the callee ------------------------------------------------------------------------

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        now = time.monotonic()
        served = Served(
            caller=call.src,
            number=call.meta[self.name],
            function=name_of(call.invocation),
            arrived=call.arrived or now,
            taken=call.taken or now,
        )
        call.notes[self.name] = served
        self._add(self.part.served, served)
        return contextlib.nullcontext() if call.invocation is None else self._run(served)

    def before_resume(self, call: IncomingCall) -> AbstractContextManager[Any]:
        served: Served | None = call.notes.get(self.name)
        return contextlib.nullcontext() if served is None else self._run(served)

    @contextlib.contextmanager
    def _run(self, served: Served) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            served.runs.append((self._thread(), began, time.monotonic()))

    def before_reply(self, call: IncomingCall) -> AbstractContextManager[Any]:
        served: Served | None = call.notes.get(self.name)
        return contextlib.nullcontext() if served is None else self._encode(served)

    @contextlib.contextmanager
    def _encode(self, served: Served) -> Iterator[None]:
        began = time.monotonic()
        yield
        served.encoding = self._thread(), began, time.monotonic()

    def after_encode_reply(self, call: IncomingCall) -> None:
        call.reply_meta[self.name] = None  # for ``on_result``

    after_kept = after_encode_reply


# -- run on each worker, by a call --------------------------------------------------------------


def _hook() -> TraceHook | None:
    hooks = current.get_agent().hooks
    return next((hook for hook in hooks if isinstance(hook, TraceHook)), None)


# Traces that have ended; the call that was to begin one here may come yet.
_ended: collections.deque[str] = collections.deque(maxlen=100)


@prompt
def start(run: str) -> None:
    """Begin to record on this worker, unless the trace has ended.

    Args:
        run: names the trace.

    Raises:
        RuntimeError: a trace is being recorded.
    """
    if run in _ended:
        return
    if _hook() is not None:
        raise RuntimeError(
            f"RPC worker {current.get_agent().info.name!r} is being traced: one trace at a time"
        )
    current.get_agent().hooks.append(TraceHook(current.get_agent().member, run=run))


@prompt
def stop(run: str) -> Part | None:
    """End a trace on this worker; return what was recorded, None if nothing was."""
    hook = _hook()
    if hook is None or hook.run != run:
        _ended.append(run)
        return None
    current.get_agent().hooks.remove(hook)
    return hook.snapshot()


@prompt
def clock_here() -> tuple[str, float]:
    """Return this host's clock; see ``clocks``."""
    return clock()


# -- a run ----------------------------------------------------------------------------------------


def trace_until_shutdown(agent: Agent, group: str, give: Callable[[bytes], None]) -> None:
    """Record all calls of a worker until it shuts down.

    Args:
        agent: the worker's.
        group: names its group's run.
        give: called with the pickled ``Part`` at the end.
    """
    hook = TraceHook(agent.member, group)
    agent.hooks.append(hook)

    def end() -> None:
        if hook in agent.hooks:
            agent.hooks.remove(hook)
            try:
                give(pickle.dumps(hook.snapshot()))
            except Exception as exc:
                name = agent.info.name
                logger.warning("the trace lacks the calls of RPC worker %r: %s", name, exc)

    agent.on_shutdown(end)
