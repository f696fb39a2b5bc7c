"""What a worker does now, as data: its calls, what its threads wait for, RRefs, memory.

A report is the answer to an INSPECT frame.  A call is named by its caller's id and its number
there, ``"0:17"``, so that the reports of both sides fit together (``waits``).  No lock is taken but
those that are held for a few instructions: a worker whose calls hang reports that.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from rayrpc._concurrency.frames import frames_of_threads, local
from rayrpc._concurrency.latency_profile import LatencyProfile
from rayrpc._observe.rref_list import rref_report
from rayrpc._observe.stacks import users_stack
from rayrpc._observe.tables import duration
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import NOTHING, Invocation, plain_name
from rayrpc._runtime.open_call import OpenCall, Request
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.served_call import ServedCall
from rayrpc.futures import AnyFuture, wait_all

__all__ = ["Inspector", "function_name", "name_of", "name_of_request", "open_requests"]

# What a fetch is called.
_TO_HERE = "RRef.to_here"


def function_name(func: object) -> str:
    """Return the name of what a call runs, as a user would write it.

    Args:
        func: a callable; a text: the name of a method; None: not known.
    """
    if func is None or isinstance(func, str):
        return func or ""
    if isinstance(func, functools.partial):
        return function_name(func.func)
    name = plain_name(func)
    module = getattr(func, "__module__", None) or ""
    return name if module in ("", "__main__", "__mp_main__", "builtins") else f"{module}.{name}"


def name_of(invocation: Invocation | None) -> str:
    """Return the name of what an invocation runs; of an RRef's proxy, that of the method.

    Args:
        invocation: None, or NOTHING: of a fetch.
    """
    if invocation is None or invocation is NOTHING:
        return _TO_HERE
    func, args, _ = invocation
    key = LatencyProfile.key(func, args)
    return function_name(key[1] if isinstance(key, tuple) else func)


def name_of_request(request: Request) -> str:
    """Return the name of what a call runs, as its caller knows it."""
    return function_name(request.func) or _TO_HERE


def open_requests(agent: Agent) -> list[Request]:
    """Return a worker's own calls that have not completed."""
    waiting, opened = agent.caller.under_way()
    return [*waiting, *(call.request for call in opened)]


class Inspector:
    """Report on a worker.

    Args:
        agent (Agent): the worker's.
        is_hosted (bool): its process is that of its actor.
    """

    def __init__(self, agent: Agent, is_hosted: bool) -> None:
        self._agent = agent
        self._is_hosted = is_hosted
        self._since = time.monotonic()

    def answer(self, what: bytes) -> bytes:
        """Return a report as JSON.

        Args:
            what: ``b"stacks"``: with the threads' stacks; ``b"rrefs"``: of the RRefs alone.
        """
        if what == b"rrefs":
            return rref_report(*self._agent.rrefs.listed())
        return json.dumps(self.report(with_stacks=what == b"stacks")).encode()

    def report(self, with_stacks: bool = False) -> dict[str, Any]:
        """Return a report.

        Args:
            with_stacks: with where users' code is, in each thread.

        Returns:
            Plain values, by name.  Times are in seconds until now, memory is in bytes.
        """
        agent = self._agent
        now = time.monotonic()
        # a thread that waits for a call before and after its own call was looked at, which no
        # other one can have followed meanwhile, did both at once
        before = self._waits()
        served = agent.callee.under_way()
        serves = {call.thread: self._key(call) for call in served if call.thread}
        waits = {
            ident: kept
            for ident, keys in self._waits().items()
            if (kept := [key for key in keys if key in before.get(ident, ())])
        }
        owned, held = agent.rrefs.counts()
        slots = agent.slots
        return {
            "name": agent.member.name,
            "id": agent.member.id,
            "node": agent.member.node,
            "host": platform.node(),
            "pid": os.getpid(),
            "hosted": self._is_hosted,
            "seconds": now - self._since,
            "memory": _resident_bytes(),
            "slots": {
                "limit": slots.limit,
                "busy": slots.limit - slots.free,
                "queued": slots.waiting,
            },
            "sent": agent.caller.sent,
            "served": agent.callee.served,
            "sent_bytes": agent.sent_bytes(),
            "rrefs": {"owned": owned, "held": held},
            "calls": [self._sent(request, now) for request in open_requests(agent)],
            "serving": [self._served(call, served, now) for call in served],
            "threads": list(_threads(waits, self._noted(now), serves, with_stacks)),
        }

    def waits_in_words(self) -> dict[int, list[str]]:
        """Return which calls threads wait for, by their ident, for people."""
        now = time.monotonic()
        texts = {}
        for request in open_requests(self._agent):
            call = self._sent(request, now)
            how_long = duration(call["seconds"])
            texts[call["key"]] = f"{call['to']} ({call['function']}, {how_long})"
        words = {
            ident: [texts[key] for key in keys if key in texts]
            for ident, keys in self._waits().items()
        }
        for ident, wait in self._noted(now).items():
            if not words.get(ident) and wait["for"]:
                text = f"{', '.join(wait['for'])}, in {wait['where']}"
                words[ident] = [f"{text} ({duration(wait['seconds'])})"]
        return words

    # -- calls --------------------------------------------------------------------------------

    def _key(self, call: ServedCall) -> str:
        return f"{call.src}:{call.id}"

    def _sent(self, request: Request, now: float) -> dict[str, Any]:
        return {
            "key": f"{self._agent.info.id}:{request.id}",
            "to": request.to.name,
            "function": name_of_request(request),
            "seconds": now - request.since,
        }

    def _served(self, call: ServedCall, calls: list[ServedCall], now: float) -> dict[str, Any]:
        is_fetch = call.rref_id is not None and call.cell is None
        makers = [each for each in calls if is_fetch and each.rref_id == call.rref_id and each.cell]
        caller = self._agent.members.find(call.src)
        if call.thread:
            state = "running"
        elif call.func is None and not is_fetch:
            state = "queued"
        else:
            state = "waiting"
        return {
            "key": self._key(call),
            "from": str(call.src) if caller is None else caller.name,
            "function": function_name(call.func) or (_TO_HERE if is_fetch else ""),
            "seconds": now - call.since,
            "state": state,
            "thread": call.thread,
            # of a fetch: the call that makes the value
            "after": [self._key(each) for each in makers],
        }

    def _noted(self, now: float) -> dict[int, dict[str, Any]]:
        """Return what each thread waits for apart from calls, by its ident."""
        return {
            ident: {"where": wait.where, "for": [*wait.workers()], "seconds": now - wait.since}
            for ident, wait in self._agent.waits.now().items()
        }

    def _waits(self) -> dict[int, list[str]]:
        """Return the calls that each thread waits for, by its ident."""
        me = self._agent.info.id
        waiting, opened = self._agent.caller.under_way()
        found: dict[int, list[str]] = {}
        for request in waiting:
            if request.thread:
                found.setdefault(request.thread, []).append(f"{me}:{request.id}")
        cells = {id(call.cell): call for call in self._agent.callee.under_way() if call.cell}
        futures = {id(call.future): call for call in opened if call.future is not None}
        for ident, frames in frames_of_threads().items():
            for key in _awaited(me, frames, futures, cells):
                found.setdefault(ident, []).append(key)
        return found


def _awaited(
    me: int,
    frames: Iterable[tuple[FrameType, int]],
    futures: dict[int, OpenCall],
    cells: dict[int, ServedCall],
) -> Iterator[str]:
    """Return the calls whose Futures, or whose RRefs' values, a thread waits for.

    Args:
        me: id of this worker.
        frames: the thread's.
        futures, cells: calls by the ``id`` of their Future or cell.
    """
    for frame, _ in frames:
        for future in _awaited_futures(frame):
            if (call := futures.get(id(future))) is not None:
                yield f"{me}:{call.request.id}"
        if frame.f_code is Cell.wait.__code__:
            cell = local(frame, "self")
            if (served := cells.get(id(cell))) is not None:
                yield f"{served.src}:{served.id}"


def _awaited_futures(frame: FrameType) -> list[Any]:
    """Return the Futures that a function on a thread's stack waits for."""
    code = frame.f_code
    if code is wait_all.__code__:
        futures = local(frame, "futures")  # at first what the program gave, maybe an iterator
        return [each for each in futures if not each.done()] if isinstance(futures, list) else []
    if code is getattr(AnyFuture.wait, "__code__", None):  # of ``extend_futures``
        return [local(frame, "self")]
    return []


def _threads(
    waits: dict[int, list[str]],
    noted: dict[int, dict[str, Any]],
    serves: dict[int, str],
    with_stacks: bool,
) -> Iterator[dict[str, Any]]:
    """Return what is to be told of the threads that run users' code, or wait for others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = _main_thread()
    for ident, frames in frames_of_threads().items():
        stack = users_stack(frames) if with_stacks else []
        if not (stack or ident == main or ident in {*waits, *noted, *serves}):
            continue
        yield {
            "ident": ident,
            "name": names.get(ident, str(ident)),
            "is_main": ident == main,
            "waits_for": waits.get(ident, []),
            "waits_in": noted.get(ident),
            "serves": serves.get(ident),
            "stack": stack,
        }


def _main_thread() -> int | None:
    """Return the ident of the thread that runs the program's main.

    A hosted rank's has the name of the process's main thread, which was there before it.
    """
    named = [each.ident for each in threading.enumerate() if each.name == "MainThread"]
    return named[-1] if named else threading.main_thread().ident


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return 0
