"""Add the events of calls to the profiles of torch's legacy autograd profiler.

torch keeps the records of a profile in C++, and takes no events of other processes.  So those of
callees are kept here, by the thread that profiles, and added where a profile parses its records.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

__all__ = ["Event", "REMOTE_OP", "Recording", "current", "install", "recorded"]

#: stands between the name of a call's event and that of an event on its callee
REMOTE_OP = "#remote_op: "
_OPTIONS = (
    "use_cuda",
    "record_shapes",
    "with_flops",
    "profile_memory",
    "with_stack",
    "with_modules",
)
_FIELDS = (
    "thread",
    "fwd_thread",
    "input_shapes",
    "stack",
    "scope",
    "use_device",
    "cpu_memory_usage",
    "device_memory_usage",
    "is_async",
    "sequence_nr",
    "flops",
)


class Event(NamedTuple):
    """What a profile has recorded on a worker.

    Args:
        name (str): of the operator, or of the call.
        node_id (int): id of the worker.
        start, end (float): in microseconds since its recording began.
        rest (dict): other arguments of torch's ``FunctionEvent``.
    """

    name: str
    node_id: int
    start: float
    end: float
    rest: dict[str, Any]


class Recording:
    """A profile of the present thread.

    Args:
        options (dict): of the profile.
        is_remote (bool): it was begun for a caller.
    """

    def __init__(self, options: dict[str, Any], is_remote: bool) -> None:
        self.options = options
        self.is_remote = is_remote
        self.events: list[Event] = []
        #: id of this worker, once a call was made
        self.node_id: int | None = None
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        """Microseconds since it began."""
        return (time.perf_counter() - self._began) * 1e6

    def add(self, key: str, began: float, events: list[Event], microseconds: float) -> None:
        """Add the events of a callee.

        Args:
            key: name of the call's event.
            began: when it was sent.
            events: of the callee.
            microseconds: how long the callee recorded; in the middle of the call.
        """
        offset = began + max(0.0, (self.now - began - microseconds) / 2)
        self.events += [
            event._replace(
                name=key + REMOTE_OP + event.name,
                start=event.start + offset,
                end=event.end + offset,
            )
            for event in events
        ]


class _Here(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.ended: Recording | None = None  # whose profile parses its records
        self.begins_remote = False


_here = _Here()


def current() -> Recording | None:
    """Return the innermost recording of this thread."""
    return _here.recordings[-1] if _here.recordings else None


@contextlib.contextmanager
def recorded(options: dict[str, Any], node_id: int) -> Iterator[Recording]:
    """Record what this thread does, for a caller.

    Args:
        options: of the caller's profile.
        node_id: id of this worker.
    """
    profile: Any = profiler_legacy.profile(**options)
    _here.begins_remote = True
    try:
        profile.__enter__()
    finally:
        _here.begins_remote = False
    recording = _here.recordings[-1]
    recording.node_id = node_id
    try:
        yield recording
    finally:
        profile.__exit__(None, None, None)
        recording.events += [_packed(event, node_id) for event in profile.function_events]


def _packed(event: Any, node_id: int) -> Event:
    rest = {name: getattr(event, name) for name in _FIELDS}
    rest["trace_name"] = event.trace_name
    times = event.time_range
    return Event(event.name, node_id, times.start, times.end, rest)


def _unpacked(event: Event) -> Any:
    rest = dict(event.rest)
    if rest.get("trace_name") is not None:
        rest["trace_name"] = event.name
    made: Any = FunctionEvent
    return made(
        id=0,
        name=event.name,
        start_us=event.start,
        end_us=event.end,
        node_id=event.node_id,
        is_remote=True,
        is_legacy=True,
        **rest,
    )


def _merged(functions: list[Any], recording: Recording) -> list[Any]:
    """Return the events of a profile and those of its calls, in torch's order."""
    if recording.node_id is not None:
        for function in functions:
            function.node_id = recording.node_id
    functions = functions + [_unpacked(event) for event in recording.events]
    functions.sort(key=lambda each: [each.time_range.start, -each.time_range.end])
    return functions


def install() -> None:
    """Have torch's legacy profiler note its recordings; may be called again."""
    profile: Any = profiler_legacy.profile
    module: Any = profiler_legacy
    if hasattr(profile, "_rayrpc_start_trace"):
        return
    start, leave, parse = profile._start_trace, profile.__exit__, module._parse_legacy_records

    def start_trace(self: Any) -> None:
        start(self)
        options = {name: getattr(self, name) for name in _OPTIONS}
        _here.recordings.append(Recording(options, _here.begins_remote))

    def exit_profile(self: Any, *exc_info: Any) -> Any:
        if self.enabled and _here.recordings:
            _here.ended = _here.recordings.pop()
        try:
            return leave(self, *exc_info)
        finally:
            _here.ended = None

    def parse_records(records: Any) -> Any:
        functions = parse(records)
        recording = _here.ended
        if recording is None or recording.is_remote:
            return functions
        return _merged(functions, recording)

    profile._rayrpc_start_trace = start
    profile._start_trace = start_trace
    profile.__exit__ = exit_profile
    module._parse_legacy_records = parse_records
