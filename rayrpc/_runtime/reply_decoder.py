"""Reply frames to the results of calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from rayrpc._concurrency.outcome import Outcome, Value
from rayrpc._concurrency.reader import is_reader
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._runtime.open_call import Request
from rayrpc._runtime.serialization.remote_errors import RemoteException, rebuild
from rayrpc._runtime.worker import Worker

__all__ = ["ReplyDecoder"]


class ReplyDecoder:
    """Read the replies to the calls of one worker, and release those that nothing waits for.

    Args:
        worker (Worker): the parts of that worker.
        submit (Callable): runs a task in another thread.
    """

    def __init__(self, worker: Worker, submit: Callable[[Callable[[], None]], object]) -> None:
        self._worker = worker
        self._rrefs = worker.rrefs
        self._hooks = worker.hooks
        self._submit = submit

    def decode(self, request: Request, reply: Frame, taken: set[int] | None = None) -> Any:
        """Return the value of a call, or raise its error.

        Args:
            request: of the call.
            reply: to it.
            taken: see ``Codec.decode``.
        """
        __tracebackhide__ = True
        if reply.control or reply.ack:
            self._take_control(request.to, reply)
        if reply.kind is not Kind.VALUE:
            remote = RemoteException(*pickle.loads(reply.data))
            raise rebuild(remote, request.keeps_type)
        refs = reply.objects.refs if reply.objects is not None else ()
        codec = self._worker.codec
        value = codec.decode(reply.data, reply.buffers, reply.forks, taken, refs)
        if reply.forks:
            self._rrefs.flush()
        if reply.meta and request.call is not None:
            for hook in self._hooks:
                if hook.name in reply.meta:
                    value = hook.on_result(request.call, value, reply.meta[hook.name])
        return value

    def release(self, request: Request, outcome: Outcome[Frame]) -> None:
        """Release what a late reply brings; until then ``request`` keeps the lent handles."""
        if isinstance(outcome, Value):
            reply = outcome.value

            def run() -> None:
                for fork in reply.forks:
                    self._rrefs.discard(fork)
                self._on_control(request.to, reply)

            self._submit(run)

    def on_control_reply(self, to: Member, reply: Frame) -> None:
        """Apply the reply to a CONTROL frame."""
        if reply.control:
            self.run_callback(lambda: self._on_control(to, reply))
        else:
            self._take_control(to, reply)

    def run_callback(self, task: Callable[[], None]) -> None:
        """Run a task that may run users' code: here if this thread is a reader, else elsewhere."""
        if is_reader():
            task()
        else:
            self._submit(task)

    def _on_control(self, to: Member, reply: Frame) -> None:
        self._take_control(to, reply)
        self._rrefs.flush()

    def _take_control(self, to: Member, reply: Frame) -> None:
        if self._worker.members.epochs.get(to.id) == to.epoch:  # no successor has its id
            self._rrefs.on_control(to.id, reply.ack, reply.control)
