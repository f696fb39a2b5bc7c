"""Metrics of a worker: what it calls and serves, how long that takes, and what it holds."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from rayrpc._concurrency.outcome import Error, Outcome
from rayrpc._concurrency.threads import SingleThread
from rayrpc._concurrency.waiting import Event
from rayrpc._observe.report import function_name, open_requests
from rayrpc._protocol.metrics import METRICS, Sink
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.served_call import ServedCall

__all__ = ["Metrics"]

logger = logging.getLogger(__name__)

# How often metrics are recorded.
RECORD_SECONDS = 5.0
# How many times of calls are recorded at a time; the others are counted all the same.
MOST_TIMES = 5000
# Pairs of functions and callers that have labels of their own; all others share one.
MOST_SERIES = 200
OTHER = "other"


class _Series:
    """The calls of a function by a caller since the last time."""

    __slots__ = ("count", "errors", "seconds")

    def __init__(self) -> None:
        self.count = self.errors = 0
        self.seconds: list[float] = []


class Metrics:
    """Record the metrics of a worker every few seconds, until it shuts down.

    Args:
        agent (Agent): the worker's.
        sink (Sink): takes them.
    """

    def __init__(self, agent: Agent, sink: Sink) -> None:
        self._agent = agent
        self._sink = sink
        self._labels = {"group": agent.key, "worker": agent.info.name}
        self._lock = threading.Lock()  # of what calls add to
        self._recording = threading.Lock()  # held by who records
        self._served: dict[tuple[str, str], _Series] = {}
        self._known: set[tuple[str, str]] = set()  # that have labels of their own
        self._times = 0
        self._made = 0
        self._sent: dict[str, int] = {}  # bytes by way
        self._members = {each.token for each in agent.members.all()}  # their tokens
        self._closed = Event()
        self._thread = SingleThread(self._run, "rayrpc-metrics", "there are no metrics")

    def start(self) -> None:
        """Record from now on."""
        self._agent.callee.before_reply(self._note)
        self._thread.start()

    def close(self) -> None:
        """Record for the last time; idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._record_safely()

    def _note(self, call: ServedCall, outcome: Outcome[Any]) -> None:
        """Count a call whose function has ended, in the thread that replies."""
        seconds = time.monotonic() - call.since
        caller = self._agent.members.find(call.src)
        try:
            function = function_name(call.func)
        except Exception:  # the program's callable raises it
            function = ""
        key = function or OTHER, OTHER if caller is None else caller.name
        with self._lock:
            if key not in self._known:
                if len(self._known) < MOST_SERIES:
                    self._known.add(key)
                else:
                    key = OTHER, OTHER
            series = self._served.get(key)
            if series is None:
                series = self._served[key] = _Series()
            series.count += 1
            series.errors += isinstance(outcome, Error)
            if self._times < MOST_TIMES:
                self._times += 1
                series.seconds.append(seconds)

    def _run(self) -> None:
        while not self._closed.wait(RECORD_SECONDS):
            self._record_safely()

    def _record_safely(self) -> None:
        try:
            self.record()
        except Exception as exc:
            logger.debug("metrics of %s were not recorded: %s", self._agent.info.name, exc)

    def record(self) -> None:
        """Record what has changed since the last time."""
        with self._recording:
            self._record_all()

    def _record_all(self) -> None:
        with self._lock:
            served, self._served, self._times = self._served, {}, 0
        for (function, caller), series in served.items():
            labels = {"function": function, "caller": caller}
            self._record("rayrpc_calls_served", series.count, **labels)
            self._record("rayrpc_call_errors", series.errors, **labels)
            self._record("rayrpc_call_seconds", *series.seconds, **labels)
        agent = self._agent
        before, self._made = self._made, agent.caller.sent
        self._record("rayrpc_calls_made", self._made - before)
        sent_before, self._sent = self._sent, agent.sent_bytes()
        for way, sent in self._sent.items():
            self._record("rayrpc_sent_bytes", sent - sent_before.get(way, 0), way=way)
        self._record("rayrpc_open_calls", len(open_requests(agent)))
        self._record("rayrpc_busy_slots", agent.slots.limit - agent.slots.free)
        self._record("rayrpc_queued_calls", agent.slots.waiting)
        owned, held = agent.rrefs.counts()
        self._record("rayrpc_rrefs_owned", owned)
        self._record("rayrpc_rrefs_held", held)
        known, self._members = self._members, {each.token for each in agent.members.all()}
        self._record("rayrpc_members", len(self._members))
        self._record("rayrpc_joins", len(self._members - known))
        self._record("rayrpc_leaves", len(known - self._members))

    def _record(self, name: str, *values: float, **labels: str) -> None:
        metric = METRICS[name]
        if metric.kind == "counter" and not values[0]:
            return  # Ray's counters take no 0
        self._sink.record(name, values, {**self._labels, **labels})
