"""The outcomes of calls to reply frames."""

from __future__ import annotations

import pickle
from typing import Any

from rayrpc._protocol.messages import Frame, Kind, Meta, Payload
from rayrpc._runtime.hooks import IncomingCall, all_of, hooks_in
from rayrpc._runtime.serialization.devices import refuse
from rayrpc._runtime.serialization.remote_errors import RemoteException, describe
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc._runtime.worker import Worker
from rayrpc.errors import CallError, SerializationError

__all__ = ["ReplyEncoder"]

_NONE = Payload(pickle.dumps(None, 5), [])


class ReplyEncoder:
    """Make the reply frames of one worker.

    Args:
        worker (Worker): the parts of that worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._me = worker.info
        #: errors of users' functions are printed here, too, as torch does
        self.prints_errors = True

    def value(self, request: Frame, value: Any, call: IncomingCall | None) -> Frame:
        """Return the reply that has a value; an ERROR frame if the value cannot be sent.

        Args:
            request: of the call.
            value: its result.
            call: its record for hooks; None if none takes part.
        """
        worker = self._worker
        meta = None
        try:
            devices = worker.devices.of_results(request.src)
            shares_main = worker.members.shares_main(request.src)
            if call is None:
                payload = worker.codec.encode(value, request.src, shares_main, devices)
            else:
                hooks = hooks_in(call.meta, worker.hooks)
                with all_of([hook.before_reply(call) for hook in hooks]):
                    payload = worker.codec.encode(value, request.src, shares_main, devices)
                for hook in hooks:
                    hook.after_encode_reply(call)
                meta = call.reply_meta or None
        except NoDeviceError as exc:
            caller = worker.members.name_of(request.src)
            return self.error(request, refuse(exc.device, "Response", caller))
        except SerializationError as exc:
            named = SerializationError(f"A result of RPC worker {self._me.name!r} {exc}")
            return self.error(request, named)
        except BaseException as exc:  # pickling runs users' code, which may exit
            return self.error(request, exc)
        return self.frame(request, Kind.VALUE, payload, meta)

    def none(self, request: Frame, meta: Meta | None = None) -> Frame:
        """Return the reply that has the value None."""
        return self.frame(request, Kind.VALUE, _NONE, meta)

    def describe(self, request: Frame, error: BaseException) -> RemoteException:
        """Return an error as the caller of a request can rebuild it; print it here, too."""

        def encode(kind: Any) -> bytes:
            shares_main = self._worker.members.shares_main(request.src)
            return self._worker.codec.encode(kind, request.src, shares_main).data

        return describe(error, self._me, encode, self.prints_errors)

    def error(
        self, request: Frame, error: BaseException, remote: RemoteException | None = None
    ) -> Frame:
        """Return the reply that has an error; ``remote`` describes it, if that is known."""
        remote = remote or self.describe(request, error)
        return self.frame(request, Kind.ERROR, Payload(pickle.dumps(tuple(remote), 5), []))

    def refusal(self, request: Frame) -> Frame:
        """Return the reply to a former member whose id another one has now."""
        successor = self._worker.members.name_of(request.src)
        error = CallError(
            f"RPC worker {self._me.name!r} refuses the call of a worker that is no member of the "
            f"group any more: {successor!r} has its id"
        )
        data = pickle.dumps(tuple(self.describe(request, error)), 5)
        session = self._worker.session  # without ``frame``, which adds the successor's messages
        return Frame(Kind.ERROR, session, self._me.id, request.call_id, data=data)

    def frame(
        self, request: Frame, kind: Kind, payload: Payload, meta: Meta | None = None
    ) -> Frame:
        """Return a reply, with the pending messages of the RRef protocol for its receiver.

        Args:
            request: of the call.
            kind, meta: of the frame.
            payload: what is sent.
        """
        ack, control = self._worker.rrefs.take_pending(request.src)
        return Frame(
            kind,
            self._worker.session,
            self._me.id,
            request.call_id,
            meta=meta,
            ack=ack,
            control=control,
            forks=payload.forks,
            data=payload.data,
            buffers=payload.buffers,
            objects=payload.objects,
        )
