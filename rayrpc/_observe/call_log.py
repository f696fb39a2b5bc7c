"""Log each call, a line where it is sent, where it runs and where it is answered."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from rayrpc._observe.report import name_of
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall

__all__ = ["CallLog"]

logger = logging.getLogger(__name__)


class CallLog(Hook):
    """Log the calls of a worker; it is among the hooks only where ``log_level`` is DEBUG.

    Args:
        agent (Agent): the worker's.
    """

    name = "log"

    def __init__(self, agent: Agent) -> None:
        self._find = agent.members.find
        self._worker = agent.info.name

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        call.notes[self.name] = time.monotonic()
        return contextlib.nullcontext()

    def after_encode(self, call: OutgoingCall) -> None:
        logger.debug(
            "%s calls %s on %s (%s, %d bytes)",
            self._worker,
            name_of(call.invocation),
            call.to.name,
            call.mode,
            call.size,
        )
        call.meta[self.name] = True

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        seconds = time.monotonic() - call.notes[self.name]
        logger.debug(
            "%s has the answer of %s to %s after %.3f ms",
            self._worker,
            call.to.name,
            name_of(call.invocation),
            seconds * 1e3,
        )
        return value

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        if call.invocation is None:
            return contextlib.nullcontext()
        member = self._find(call.src)
        caller = str(call.src) if member is None else member.name
        return self._run(name_of(call.invocation), caller, call.arrived)

    @contextlib.contextmanager
    def _run(self, function: str, caller: str, arrived: float) -> Iterator[None]:
        began = time.monotonic()
        waited = began - arrived if arrived else 0.0
        logger.debug(
            "%s runs %s for %s, %.3f ms after its arrival",
            self._worker,
            function,
            caller,
            waited * 1e3,
        )
        try:
            yield
        except BaseException as exc:
            how = f"raised {type(exc).__name__}"
            raise
        else:
            how = "returned"
        finally:
            seconds = time.monotonic() - began
            logger.debug("%s: %s %s after %.3f ms", self._worker, function, how, seconds * 1e3)

    def after_encode_reply(self, call: IncomingCall) -> None:
        call.reply_meta[self.name] = True  # for ``on_result``

    after_kept = after_encode_reply
