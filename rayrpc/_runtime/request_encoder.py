"""Calls to request frames."""

from __future__ import annotations

import itertools

from rayrpc._protocol.ids import EPOCH_BITS, GloballyUniqueId
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import EMPTY, Frame, Kind, Meta, Payload
from rayrpc._runtime.invocation import Invocation, is_prompt, plain_name
from rayrpc._runtime.serialization.devices import refuse
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc._runtime.worker import Worker
from rayrpc.errors import SerializationError

__all__ = ["RequestEncoder"]


class RequestEncoder:
    """Make the request frames of one worker, and number them.

    Args:
        worker (Worker): the parts of that worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._rrefs = worker.rrefs
        self._me = worker.info.id
        first = (worker.members.me.epoch << EPOCH_BITS) + 1
        #: returns the number of the next call
        self.new_id = itertools.count(first).__next__

    def encode(self, to: Member, invocation: Invocation) -> Payload:
        """Pickle what a worker is to run.

        Raises:
            SerializationError: it cannot be sent; the error names the function and the worker.
            RuntimeError: a tensor is on a device that the worker's device map does not have.
        """
        worker = self._worker
        try:
            devices = worker.devices.of_calls(to.name)
            shares_main = to.main == worker.members.me.main
            how = to.id, shares_main, devices, worker.objects.at_hand
            return worker.codec.encode_call(invocation, *how)
        except NoDeviceError as exc:
            raise refuse(exc.device, "Request", to.name) from None
        except SerializationError as exc:
            name = plain_name(invocation.func)
            raise SerializationError(
                f"The call of {name} on RPC worker {to.name!r} {exc}"
            ) from exc.__cause__

    def frame(
        self,
        kind: Kind,
        to: Member,
        payload: Payload = EMPTY,
        meta: Meta | None = None,
        func: object = None,
        rref_id: GloballyUniqueId | None = None,
        fork_id: GloballyUniqueId | None = None,
    ) -> Frame:
        """Return a request, with the pending messages of the RRef protocol for its receiver.

        Args:
            kind, meta, rref_id, fork_id: of the frame.
            to: the receiver.
            payload: what is sent.
            func: what it runs.
        """
        ack, control = self._rrefs.take_pending(to.id)
        return Frame(
            kind,
            self._worker.session,
            self._me,
            self.new_id(),
            rref_id=rref_id,
            fork_id=fork_id,
            is_async=hasattr(func, "_wrapped_async_rpc_function"),
            meta=meta,
            ack=ack,
            control=control,
            forks=payload.forks,
            data=payload.data,
            buffers=payload.buffers,
            takes_slot=not is_prompt(func),
            objects=payload.objects,
        )
