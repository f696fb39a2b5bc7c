"""The attached process's side of its relay: take calls by long poll, send results back.

Each thread that polls is in one of two states:

    EXCHANGING ── the relay returns frames ──> SERVING ── fewer than two exchange ──> EXCHANGING
                                                  └────── two others exchange ──────> ended

A thread serves the last frame of an exchange itself, and takes its result along with its next
exchange.  If no thread exchanges while it serves, it starts another, so that the relay never waits.

Each exchange has a number, under which it is repeated if its connection breaks, or if the relay
dies: Ray starts it again.  What the process has not got from it by then is lost.

Results that no exchange takes along are sent by one thread at a time:

    IDLE ── add ──> SENDING ── add ──> SENDING ── the queue is empty ──> IDLE
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Deferred, Serve, served
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.endpoint import Wire, from_wire
from rayrpc._transports.ray.relay import Item
from rayrpc._transports.serving import ServingThreads

__all__ = ["PollSchedule", "RelayClient", "ResultQueue"]

logger = logging.getLogger(__name__)

MAX_EXCHANGES = 2

# Pause before an exchange is repeated.
RETRY_SECONDS = 0.05
# ... after a failure of Ray that is not known to pass soon.
FAULT_SECONDS = 0.5

#: the number of a held call, and its reply
Result = tuple[int, Wire]


class PollSchedule:
    """Count the threads that exchange with the relay; see the states above.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanging = 0

    def begin(self) -> bool:
        """Enter EXCHANGING; return False if enough threads exchange."""
        with self._lock:
            if self._exchanging >= MAX_EXCHANGES:
                return False
            self._exchanging += 1
            return True

    def end(self) -> bool:
        """Leave EXCHANGING; return True if no thread is left there, and one has to start."""
        with self._lock:
            self._exchanging -= 1
            return self._exchanging == 0


class ResultQueue:
    """Queue results for the relay; see the states above.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: list[Result] = []
        self._is_sending = False

    def add(self, result: Result) -> bool:
        """Queue a result; return True if the caller has to start a sender."""
        with self._lock:
            self._results.append(result)
            starts = not self._is_sending
            self._is_sending = True
            return starts

    def take(self) -> list[Result]:
        """Return all results, for an exchange."""
        with self._lock:
            results, self._results = self._results, []
            return results

    def put_back(self, results: list[Result]) -> None:
        """Queue results again that the sender, which has ended, could not send."""
        with self._lock:
            self._results[:0] = results
            self._is_sending = False

    def take_to_send(self) -> list[Result]:
        """Return all results, for the sender; if there are none, it has ended."""
        with self._lock:
            results, self._results = self._results, []
            self._is_sending = bool(results)
            return results


class RelayClient:
    """Serve the calls that a relay receives.

    Args:
        relay: handle of the relay.
        to_wire (Callable): returns the form of a reply that Ray sends.
        threads (ThreadCache): poll, serve and send.
        on_reply (Callable): called with the id and the late reply of a call of this process.
        send_reply (Callable): sends the reply to a deferred call: the request, then the reply.
        on_restarted (Callable): called when the relay was started again, and late replies may be
            lost.
    """

    def __init__(
        self,
        relay: Any,
        to_wire: Callable[[Frame], Wire],
        threads: ThreadCache,
        on_reply: Callable[[int, Wire], None],
        send_reply: Callable[[Frame, Frame], None],
        on_restarted: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._to_wire = to_wire
        self._threads = threads
        self._on_reply = on_reply
        self._send_reply = send_reply
        self._on_restarted = on_restarted
        self._serve: Serve | None = None
        self._schedule = PollSchedule()
        self._results = ResultQueue()
        self._serving = ServingThreads()
        self._next_number = itertools.count(1).__next__  # of exchanges
        self._has_polled = False
        self._closed = False

    def start(self, serve: Serve) -> None:
        """Serve calls from now on."""
        self._serve = serve
        self._start_poller()

    def flush_replies(self, timeout: float) -> None:
        """Wait until the calls that other threads serve are replied to.

        Args:
            timeout: in seconds.
        """
        self._serving.wait_for_others(timeout)

    def close(self, token: str, timeout: float) -> None:
        """Stop polling, and end the relay.

        Args:
            token: of this worker's membership.
            timeout: how long the relay waits for the results of held calls, in seconds.
        """
        self._closed = True
        if self._has_polled:  # else no peer waits for a reply; the relay may not run yet
            with contextlib.suppress(RayError):
                ray_api.get(ray_api.submit(self._relay.close, token, timeout))
        ray.kill(self._relay)

    # -- polling ------------------------------------------------------------------------------

    def _start_poller(self) -> None:
        if self._schedule.begin():
            self._threads.submit(self._poll)

    def _poll(self) -> None:
        """Exchange and serve, until the relay or this ends, or enough others exchange."""
        results: list[Result] = []
        try:
            self._exchange_and_serve(results)
        except BaseException:
            self._serving.end()
            # another thread goes on, and sends what this one was about to
            if not self._closed:
                logger.exception("error in a thread that polls the relay")
                time.sleep(FAULT_SECONDS)
                for result in results:
                    self._send_result(result)
                self._start_poller()

    def _exchange_and_serve(self, results: list[Result]) -> None:
        """Poll in this thread.

        Args:
            results: those that the next exchange sends are in this list.
        """
        arrived: list[int] = []
        while not self._closed:
            number = self._next_number()
            try:
                items = self._exchange(number, arrived, results)
            except BaseException:
                self._schedule.end()
                raise
            if items is None:
                return
            results.clear()
            arrived = [number]
            if any(kind == "call" and held is None for kind, held, _ in items):
                ray_api.submit(self._relay.note_arrived, arrived)  # their callers wait for it
            self._serving.begin()  # until the results are sent
            self._has_polled = True
            if self._schedule.end() and not self._closed:
                self._start_poller()
            self._serve_all(items, results)
            if not self._schedule.begin():
                for result in results:
                    self._send_result(result)
                results.clear()
                ray_api.submit(self._relay.note_arrived, arrived)
                self._serving.end()
                return
            results += self._results.take()

    def _exchange(
        self, number: int, arrived: list[int], results: list[Result]
    ) -> list[Item] | None:
        """Send results and wait for frames; return None if there will be none.

        Args:
            number: of this exchange.
            arrived: number of this thread's last one, if there was one.
            results: to send.
        """

        def exchange() -> Any:
            ref = ray_api.submit(self._relay.exchange, number, arrived, results[:])
            self._serving.end()
            return ref

        try:
            items: list[Item] = self._ask(exchange)
            return items
        except RayActorError:
            if not self._closed:
                logger.error("the relay of this worker is gone: no peer can reach it")
        except SystemExit:  # what Ray raises in its users' threads
            self._log_shutdown()
        except Exception:
            if ray.is_initialized() and not self._closed:
                raise
            self._log_shutdown()
        return None

    def _log_shutdown(self) -> None:
        if not self._closed:
            logger.error("Ray was shut down under RPC: call rpc.shutdown() before")

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return the relay's answer; repeat the call while the connection breaks.

        Args:
            call: calls the relay; returns an ObjectRef.

        Raises:
            RayActorError: the relay has died.
        """
        faults = 0
        while True:
            try:
                return ray_api.get(call())
            except ActorUnavailableError:
                if self._closed:
                    raise
                time.sleep(RETRY_SECONDS)
            except RayActorError:
                raise
            except RayError as exc:
                if self._closed or not ray.is_initialized():
                    raise
                if not faults:
                    logger.warning("the relay of this worker is asked again: %s", exc)
                faults += 1
                time.sleep(FAULT_SECONDS)

    # -- serving ------------------------------------------------------------------------------

    def _serve_all(self, items: list[Item], results: list[Result]) -> None:
        """Serve frames, the last one in this thread; add its result, if it has one now."""
        last = len(items) - 1
        for position, (kind, number, wire) in enumerate(items):
            if kind == "reply":
                assert number is not None
                self._on_reply(number, wire)
            elif kind == "restarted":
                logger.warning("the relay of this worker died, and was started again")
                self._on_restarted()
            elif position < last:
                self._threads.submit(functools.partial(self._serve_and_send, number, wire))
            else:
                self._serve_one(number, wire, results)

    def _serve_and_send(self, number: int | None, wire: Wire) -> None:
        self._serving.begin()
        try:
            self._serve_one(number, wire, None)
        finally:
            self._serving.end()

    def _serve_one(self, number: int | None, wire: Wire, results: list[Result] | None) -> None:
        """Serve a frame; append its result to ``results`` for the next exchange, or send it."""
        assert self._serve is not None
        frame = from_wire(wire)
        reply = served(self._serve, frame)
        if isinstance(reply, Deferred):
            reply.on_done(functools.partial(self._reply_later, frame, number))
        elif number is not None and results is not None:
            results.append((number, self._to_wire(reply)))
        else:
            self._reply(frame, number, reply)

    def _reply_later(self, frame: Frame, number: int | None, reply: Frame) -> None:
        reply.keep_buffers()
        self._threads.submit(lambda: self._reply(frame, number, reply))

    def _reply(self, frame: Frame, number: int | None, reply: Frame) -> None:
        if number is None:
            self._send_reply(frame, reply)
        else:
            self._send_result((number, self._to_wire(reply)))

    def _send_result(self, result: Result) -> None:
        """Send a result, together with those that are added meanwhile."""
        if self._results.add(result):
            self._threads.submit(self._send_results)

    def _send_results(self) -> None:
        while not self._closed and (results := self._results.take_to_send()):
            try:
                self._ask(functools.partial(ray_api.submit, self._relay.give, results))
            except RayError:  # the relay has ended, and the calls with it
                pass
            except BaseException:  # the next one sends them, too
                self._results.put_back(results)
                raise
