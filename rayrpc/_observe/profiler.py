"""Calls as events of torch's legacy autograd profiler, under torch's names.

A caller sends the options of its profile along; the callee records what it does for the call with
a profile of its own, and replies with the events (``legacy_profile``).  Those of torch's newer
profiler are in ``kineto``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from rayrpc._concurrency.outcome import attempt, complete
from rayrpc._observe.legacy_profile import Event, Recording, current, install, recorded
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall

__all__ = ["ProfilerHook", "key_of", "profiling_key"]

_autograd: Any = torch.autograd
_profiler_enabled = _autograd._profiler_enabled  # bound once: it runs on every call


def profiling_key(mode: str, func_name: str, src: str, dst: str) -> str:
    """Return the name of a call's event: ``rpc_sync#aten::add(worker0 -> worker1)``.

    Args:
        mode: "sync", "async", "async_jit" or "remote".
        func_name: of the function that the call runs.
        src: name of the caller.
        dst: name of the callee.
    """
    return f"rpc_{mode}#{func_name}({src} -> {dst})"


def compiled_code_calls() -> bool:
    """Return whether the call that this thread sends just now is one of TorchScript code.

    ``rayrpc._torchscript`` replaces this function once something is compiled.
    """
    return False


def key_of(call: OutgoingCall) -> str:
    """Return the name of a call's event; see ``profiling_key``."""
    mode = call.mode
    if mode in ("sync", "async") and compiled_code_calls():
        mode = "async_jit"  # torch has this name for both
    return profiling_key(mode, _name_of(call.invocation.func), call.src.name, call.to.name)


def _name_of(func: Any) -> str:
    builtin = torch.jit._builtins._find_builtin(func)
    if builtin is not None:
        return str(builtin)
    if isinstance(func, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(func))
    return str(getattr(func, "__qualname__", type(func).__qualname__))


class _Sent(NamedTuple):
    """A call that is recorded.

    Args:
        key: name of its event.
        record: torch's event; None on a callee, which makes one when the call ends.
        recording: of the thread that called.
        began: when, in microseconds of the recording.
    """

    key: str
    record: Any
    recording: Recording | None
    began: float


class ProfilerHook(Hook):
    """Record the calls of a thread that runs the legacy profiler, and what callees do for them.

    Args:
        node_id (int): id of this worker.
    """

    name = "profiler"
    of_thread = True
    needs_future = True

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        install()

    def wants(self) -> bool:
        return _profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        if call.mode == "fetch":
            return contextlib.nullcontext()
        key = key_of(call)
        recording = current()
        record = None
        if recording is None or not recording.is_remote:
            record = torch.autograd.profiler.record_function(key)
        if recording is not None:
            recording.node_id = self._node_id
        began = 0.0 if recording is None else recording.now
        call.notes[self.name] = _Sent(key, record, recording, began)
        return record or contextlib.nullcontext()

    def after_encode(self, call: OutgoingCall) -> None:
        sent: _Sent | None = call.notes.get(self.name)
        if sent is not None and sent.recording is not None:
            call.meta[self.name] = sent.recording.options

    def after_send(self, call: OutgoingCall, future: Any) -> Any:
        record = call.notes[self.name].record
        if record is None:
            return future
        # torch ends an event with a Future, and returns one that takes errors for values
        end: Future[None] = Future()
        record._call_end_callbacks_on_future(end)
        ended: Future[Any] = Future()

        def on_done(done: Any) -> None:
            try:
                end.set_result(None)
            finally:
                complete(ended, attempt(done.value))

        future.add_done_callback(on_done)
        return ended

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        options = call.meta[self.name]
        if call.invocation is None or _profiler_enabled():
            return contextlib.nullcontext()
        return self._recorded(call, options)

    @contextlib.contextmanager
    def _recorded(self, call: IncomingCall, options: dict[str, Any]) -> Iterator[None]:
        with recorded(options, self._node_id) as recording:
            call.notes[self.name] = recording
            yield

    def after_encode_reply(self, call: IncomingCall) -> None:
        recording: Recording | None = call.notes.get(self.name)
        if recording is not None:
            call.reply_meta[self.name] = recording.events, recording.now

    after_kept = after_encode_reply

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        sent: _Sent = call.notes[self.name]
        recording = sent.recording
        if recording is not None:
            if sent.record is None:
                rest = {"thread": 0, "is_async": True}
                row = Event(sent.key, self._node_id, sent.began, recording.now, rest)
                recording.events.append(row)
            recording.add(sent.key, sent.began, *meta)
        return value
