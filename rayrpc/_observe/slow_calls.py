"""Log what takes long: calls without a reply, and slots that are all taken while calls wait."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rayrpc._concurrency.threads import SingleThread
from rayrpc._concurrency.waiting import Event
from rayrpc._observe.report import name_of_request, open_requests
from rayrpc._observe.stacks import place_of
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import is_asked_ahead
from rayrpc._runtime.open_call import Request

__all__ = ["SlowCalls"]

logger = logging.getLogger(__name__)

# How long a callee may take to tell where a call stands.
ANSWER_SECONDS = 5.0
# How many calls are logged at a time.
MOST_CALLS = 10
# How often calls are looked at: LOOKS times in ``seconds``, but at least every LOOK_SECONDS.
LOOKS = 4
LOOK_SECONDS = 5.0


class SlowCalls:
    """Log, once each, the calls of a worker that wait for long, with where they stand.

    Args:
        agent (Agent): the worker's.
        seconds (float): what long is.
    """

    def __init__(self, agent: Agent, seconds: float) -> None:
        self._agent = agent
        self._seconds = seconds
        self._noted: set[int] = set()  # ids of calls
        self._full_since: float | None = None
        self._closed = Event()
        self._thread = SingleThread(self._run, "rayrpc-slow-calls", "slow calls are not logged")

    def start(self) -> None:
        """Look at calls from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(min(self._seconds / LOOKS, LOOK_SECONDS)):
            try:
                self.check()
            except Exception:
                if not self._closed.is_set():
                    logger.exception("could not look for slow calls")

    def check(self) -> None:
        """Look once."""
        now = time.monotonic()
        requests = {each.id: each for each in open_requests(self._agent)}
        self._noted &= requests.keys()
        slow = [
            each
            for each in requests.values()
            if each.id not in self._noted
            and now - each.since >= self._seconds
            and not is_asked_ahead(each.func)
        ]
        self._noted |= {each.id for each in slow}
        if slow:
            self._log_calls(slow)
        self._check_slots(now)

    # -- calls --------------------------------------------------------------------------------

    def _log_calls(self, slow: list[Request]) -> None:
        slow.sort(key=lambda each: each.since)
        shown = slow[:MOST_CALLS]
        reports = self._reports(shown)
        me = self._agent.info
        for request in shown:
            served = _served(reports.get(request.to.token), f"{me.id}:{request.id}")
            name = (served or {}).get("function") or name_of_request(request)
            logger.warning(
                "RPC worker %r has waited %.0f s for %r to run %s: %s",
                me.name,
                time.monotonic() - request.since,
                request.to.name,
                name,
                _where(reports.get(request.to.token), served),
            )
        if len(slow) > len(shown):
            logger.warning(
                "RPC worker %r has waited as long for %d more calls: `rayrpc status` shows them",
                me.name,
                len(slow) - len(shown),
            )

    def _reports(self, requests: Iterable[Request]) -> dict[str, dict[str, Any]]:
        """Return the reports of the callees, by their tokens; without those that do not answer."""
        members = {request.to.token: request.to for request in requests}
        answers = self._agent.inspection.request(b"stacks", ANSWER_SECONDS, list(members.values()))
        return {
            member.token: json.loads(answer)
            for member, answer in answers
            if isinstance(answer, bytes) and answer
        }

    # -- slots --------------------------------------------------------------------------------

    def _check_slots(self, now: float) -> None:
        slots = self._agent.slots
        if slots.free or not slots.waiting:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since >= self._seconds:
            self._full_since = float("inf")  # once
            logger.warning(
                "all %d slots of RPC worker %r have been taken for %.0f s, and %d calls wait for "
                "one: raise num_worker_threads, or have functions that wait return Futures "
                "(rpc.functions.async_execution). `rayrpc stack %s` shows what they do.",
                slots.limit,
                self._agent.info.name,
                self._seconds,
                slots.waiting,
                self._agent.info.name,
            )


def _served(report: Mapping[str, Any] | None, key: str) -> Mapping[str, Any] | None:
    calls = [] if report is None else report["serving"]
    return next((call for call in calls if call["key"] == key), None)


def _where(report: Mapping[str, Any] | None, call: Mapping[str, Any] | None) -> str:
    """Return where a call stands, by its callee's report."""
    if report is None:
        return "that worker does not answer"
    if call is None:
        return "the call has not arrived there, or its reply is on the way"
    if call["state"] == "queued":
        queued, limit = report["slots"]["queued"], report["slots"]["limit"]
        return f"it waits there for one of {limit} slots, with {queued} calls in all"
    if call["state"] == "waiting":
        return "the value is not there yet: a Future or a coroutine is not done"
    threads = {thread["ident"]: thread for thread in report["threads"]}
    place = place_of(threads.get(call["thread"], {}).get("stack", ()))
    return f"it is at {place}" if place else "it runs there"
