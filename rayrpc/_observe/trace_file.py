"""One trace of a group's calls, for Perfetto and Chrome, from what its workers have recorded.

A process for each worker, a thread for each of its threads.  A call is

- at its caller a slice of the thread, until the reply if the thread has waited for that, else of
  its encoding; then the whole call is a slice of its own beside the threads;
- at its callee slices of the thread that ran it: decoding, the function, encoding of the reply;
  and, beside the threads, of the time that it waited for a slot;
- arrows from the caller to the function, and from there back.

Times of other hosts are corrected by the offsets of their clocks.

Source: "Trace Event Format", of Chromium's tracing, in its JSON form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayrpc._concurrency.clocks import Clock

__all__ = ["Made", "Part", "Served", "Trace"]

#: a thread's ident, the begin and the end
Slice = tuple[int, float, float]
MICROSECONDS = 1e6
# An arrow begins and ends inside of a slice, by so much.
INSIDE_US = 0.1
# The tracks of groups are so far from one another.
MOST_WORKERS = 1_000_000
# How long the slice is where the reply to a call that no thread waits for arrives.
REPLY_US = 1.0


@dataclass(slots=True)
class Made:
    """A call at its caller; times are in seconds of that host's monotonic clock.

    Args:
        number: of the call, for this caller.
        mode: "sync", "async", "remote" or "fetch".
        function: that it runs.
        to: id of the callee.
        thread: ident of the thread that called.
        began, encoded: when the call was made, and its arguments encoded.
        ended: when the reply was decoded; 0: it had none, or an error.
        end_thread: ident of the thread that did.
        bytes: of the arguments.
    """

    number: int
    mode: str
    function: str
    to: int
    thread: int
    began: float
    encoded: float = 0.0
    ended: float = 0.0
    end_thread: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Served:
    """A call at its callee.

    Args:
        caller: its id.
        number: of the call, for that caller.
        function: that it runs.
        arrived, taken: when it was received, and when a thread took it.
        runs: of the function; a coroutine has one for each step.
        encoding: of the reply; None: there was none, or an error.
    """

    caller: int
    number: int
    function: str
    arrived: float
    taken: float
    runs: list[Slice] = field(default_factory=list)
    encoding: Slice | None = None


@dataclass(slots=True)
class Part:
    """What one worker has recorded.

    Args:
        name, node, id, pid: of the worker.
        made: its calls.
        served: those that it has served.
        threads: names by ident.
        dropped: calls that were too many.
        group: one run of one group, where a trace may have several.
        track: number of its process in the trace; set by that.
    """

    name: str
    node: str
    id: int
    pid: int
    made: list[Made] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    dropped: int = 0
    group: str = ""
    track: int = -1

    def track_of(self, worker: int) -> int:
        """Return the track of a worker of the same group."""
        return self.track - self.id + worker


class Trace:
    """The calls of a group in some time.

    Args:
        parts (Iterable[tuple[Part, Clock]]): of the workers, and how their clocks differ from that
            of the trace.
        names (Mapping[int, str]): of workers by id, also of those without a part.
    """

    def __init__(
        self, parts: Iterable[tuple[Part, Clock]] = (), names: Mapping[int, str] | None = None
    ) -> None:
        #: by track
        self.clocks: dict[int, Clock] = {}
        self._groups: list[str] = []
        self.parts: list[Part] = []
        self.names = dict(names or {})
        for part, clock in parts:
            self.add(part, clock)

    def add(self, part: Part, clock: Clock) -> None:
        """Add what a worker has recorded.

        Args:
            part (Part): of the worker.
            clock (Clock): how its clock differs from that of the trace.
        """
        if part.group not in self._groups:
            self._groups.append(part.group)
        part.track = part.id + MOST_WORKERS * self._groups.index(part.group)
        self.parts.append(part)
        self.parts.sort(key=lambda part: part.track)
        self.clocks[part.track] = clock

    def __repr__(self) -> str:
        calls = sum(len(part.made) for part in self.parts)
        names = ", ".join(part.name for part in self.parts)
        return f"<trace of {calls} calls of {names or 'no worker'}>"

    def write(self, path: str | Path) -> None:
        """Write it as JSON, for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path (str or Path): of the file.
        """
        Path(path).write_text(json.dumps(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return it in the Trace Event Format."""
        return {
            "traceEvents": list(self._events()),
            "displayTimeUnit": "ns",
            "otherData": {
                "clock_errors_us": {
                    part.name: self._clock(part).error * MICROSECONDS for part in self.parts
                },
                "dropped_calls": {part.name: part.dropped for part in self.parts},
            },
        }

    def _clock(self, part: Part) -> Clock:
        return self.clocks[part.track]

    # -- events -------------------------------------------------------------------------------

    def _events(self) -> Iterator[dict[str, Any]]:
        names = self.names | {part.track: part.name for part in self.parts}
        served = {
            (part.track_of(call.caller), call.number): (part, call)
            for part in self.parts
            for call in part.served
        }
        for part in self.parts:
            to_us = _Scale(self._clock(part).offset)
            yield from _names(part, self._clock(part))
            for made in part.made:
                found = served.get((part.track, made.number))
                yield from self._made(part, made, to_us, names, found)
            for call in part.served:
                yield from _served(part, call, to_us, names)

    def _made(
        self,
        part: Part,
        made: Made,
        to_us: _Scale,
        names: Mapping[int, str],
        found: tuple[Part, Served] | None,
    ) -> Iterator[dict[str, Any]]:
        key = f"{part.track}:{made.number}"
        began, encoded = to_us(made.began), to_us(max(made.encoded, made.began))
        state = "ok"
        ended = to_us(made.ended) if made.ended else None
        if ended is None:  # the callee knows when an error was sent
            state = "no reply"
            if found is not None and found[1].runs:
                state = "error"
                ended = _Scale(self._clock(found[0]).offset)(found[1].runs[-1][2])
        args = {
            "to": names.get(part.track_of(made.to), str(made.to)),
            "bytes": made.bytes,
            "key": key,
            "state": state,
        }
        title = f"{made.function} -> {args['to']}"
        waits = made.mode in ("sync", "fetch") and ended is not None
        end = max(encoded, ended) if waits and ended is not None else encoded
        yield _slice(part, made.thread, title, began, end, args)
        yield _slice(part, made.thread, "encode", began, encoded, {})
        if ended is not None and not waits:
            yield from _beside(part, "calls", key, title, began, max(ended, began), args)
        if made.ended and not waits:
            back = to_us(made.ended)
            title = f"reply: {made.function}"
            yield _slice(part, made.end_thread, title, back, back + REPLY_US, {"key": key})
        if found is None:
            return
        callee, there = found
        slices = [*there.runs, *([there.encoding] if there.encoding else [])]
        if not slices:
            return
        to_us_there = _Scale(self._clock(callee).offset)
        first, last = slices[0], slices[-1]
        yield _arrow("s", part, made.thread, f"{key}>", encoded - INSIDE_US)
        yield _arrow("f", callee, first[0], f"{key}>", to_us_there(first[1]))
        if made.ended:
            yield _arrow("s", callee, last[0], f"{key}<", to_us_there(last[2]) - INSIDE_US)
            inside = to_us(made.ended) + (-INSIDE_US if waits else INSIDE_US)
            yield _arrow("f", part, made.end_thread, f"{key}<", inside)


class _Scale:
    """From a worker's seconds to the trace's microseconds."""

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def __call__(self, seconds: float) -> float:
        return (seconds - self._offset) * MICROSECONDS


def _served(
    part: Part, call: Served, to_us: _Scale, names: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    caller = part.track_of(call.caller)
    key = f"{caller}:{call.number}"
    args = {"from": names.get(caller, str(call.caller)), "key": key}
    if call.taken > call.arrived:
        title = f"queued: {call.function}"
        yield from _beside(part, "queue", key, title, to_us(call.arrived), to_us(call.taken), args)
    for position, (thread, began, ended) in enumerate(call.runs):
        if position == 0 and began > call.taken:
            yield _slice(part, thread, "decode", to_us(call.taken), to_us(began), {"key": key})
        yield _slice(part, thread, call.function, to_us(began), to_us(ended), args)
    if call.encoding is not None:
        thread, began, ended = call.encoding
        yield _slice(part, thread, "encode", to_us(began), to_us(ended), {"key": key})


def _names(part: Part, clock: Clock) -> Iterator[dict[str, Any]]:
    label = f"{part.name} ({part.node}, pid {part.pid})" if part.node else part.name
    if clock.error:
        label += f", clock ±{clock.error * MICROSECONDS:.0f} us"
    pid = part.track
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for ident, name in part.threads.items():
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": part.track,
            "tid": ident,
            "args": {"name": name},
        }


def _slice(
    part: Part, thread: int, name: str, began: float, ended: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "rpc",
        "name": name,
        "pid": part.track,
        "tid": thread,
        "ts": began,
        "dur": max(0.0, ended - began),
        "args": args,
    }


def _beside(
    part: Part, kind: str, key: str, name: str, began: float, ended: float, args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a slice that is of no thread: such ones may overlap."""
    for phase, when in (("b", began), ("e", ended)):
        yield {
            "ph": phase,
            "cat": kind,
            "name": name,
            "id": f"{kind}-{key}",
            "pid": part.track,
            "tid": 0,
            "ts": when,
            "args": args,
        }


def _arrow(phase: str, part: Part, thread: int, key: str, when: float) -> dict[str, Any]:
    event = {
        "ph": phase,
        "cat": "rpc",
        "name": "call" if key.endswith(">") else "reply",
        "id": key,
        "pid": part.track,
        "tid": thread,
        "ts": when,
    }
    if phase == "f":
        event["bp"] = "e"  # to the slice that it is in
    return event
