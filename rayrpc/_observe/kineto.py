"""Calls as events of torch's profiler, Kineto (``torch.profiler``).

An event of a call may outlive its profile, and Kineto would then write its end into memory that it
has freed.  So what is open when a profile stops is ended first:

    OPEN ──the call has its reply, or an error──> ENDED
      └──a profile stops──> ENDED

While a profile stops, no event is opened.  At the callee, a function is an event of its own where
the profile is one of all threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler
from torch.futures import Future

from rayrpc._observe.profiler import key_of
from rayrpc._observe.report import name_of
from rayrpc._runtime.hooks import Hook, OutgoingCall
from rayrpc._runtime.invocation import Invocation

__all__ = ["Event", "KinetoHook"]

Around = list[Callable[[Invocation], AbstractContextManager[Any]]]

_kind: Any = torch._C._autograd._profiler_type
_KINETO = torch._C._profiler.ActiveProfilerType.KINETO
# also in a thread that a profile of all threads records
_NONE = torch._C._profiler.ActiveProfilerType.NONE

_lock = threading.RLock()  # guards what follows; the handler of a signal may make calls, too
_open: dict[Event, Future[None]] = {}
_on = 0  # profiles that record
_stopping = 0  # profiles that stop
_workers: list[Around] = []


class Event:
    """An event, from the entry of this context on; see above.

    Args:
        name (str): of the event.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends_later = False

    def __enter__(self) -> None:
        record: Any = profiler.record_function(self._name)
        end: Future[None] = Future()
        with _lock:
            if not _stopping:
                record.__enter__()
                record._call_end_callbacks_on_future(end)
                _open[self] = end

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None or not self._ends_later:
            self.end()

    def end_with(self, future: Any) -> None:
        """End it when a Future is done, and not with the context."""
        self._ends_later = True
        future.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        """End it now, unless it has ended."""
        with _lock:
            if (end := _open.pop(self, None)) is not None:
                end.set_result(None)


class KinetoHook(Hook):
    """Record the calls of a worker in torch's profiles, and the functions that it runs for others.

    Args:
        around (list): what the worker's ``Callee`` has around users' functions.
    """

    name = "kineto"
    of_thread = True
    needs_future = True

    def __init__(self, around: Around) -> None:
        self._around = around
        _install()
        with _lock:
            _workers.append(around)
            if _on:
                around.append(_served)

    def close(self) -> None:
        with _lock:
            _workers[:] = [each for each in _workers if each is not self._around]

    def wants(self) -> bool:
        return profiler._is_profiler_enabled and _kind() in (_KINETO, _NONE)

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        if call.mode == "fetch":
            return contextlib.nullcontext()
        event = call.notes[self.name] = Event(key_of(call))
        return event

    def after_send(self, call: OutgoingCall, future: Any) -> Any:
        call.notes[self.name].end_with(future)
        return future


def _served(invocation: Invocation) -> Event:
    return Event(name_of(invocation))


def _install() -> None:
    """Have events end before profiles stop; may be called again."""
    global _on
    module: Any = profiler
    enable, disable = module._enable_profiler, module._disable_profiler
    if hasattr(disable, "_rayrpc_disable"):
        return

    def enable_profiler(*args: Any, **kwargs: Any) -> Any:
        enabled = enable(*args, **kwargs)
        _started()
        return enabled

    def disable_profiler() -> Any:
        _stop()
        try:
            return disable()
        finally:
            _stopped()

    disable_profiler._rayrpc_disable = disable  # type: ignore[attr-defined]
    module._enable_profiler, module._disable_profiler = enable_profiler, disable_profiler
    _on = int(profiler._is_profiler_enabled)


def _started() -> None:
    global _on
    with _lock:
        _on += 1
        if _on == 1:
            for around in _workers:
                around.append(_served)


def _stop() -> None:
    """End all events; none is opened before ``_stopped``."""
    global _stopping
    with _lock:
        _stopping += 1
        for event in list(_open):
            event.end()


def _stopped() -> None:
    global _on, _stopping
    with _lock:
        _stopping -= 1
        _on = max(0, _on - 1)  # one that failed to start is stopped all the same
        if not _on:
            for around in _workers:
                if _served in around:
                    around.remove(_served)
