"""What the caller and the callee of one worker share."""

from __future__ import annotations

from dataclasses import dataclass

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime.hooks import Hook
from rayrpc._runtime.members import Members
from rayrpc._runtime.objects import ObjectStore
from rayrpc._runtime.rrefs.context import RRefContext
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.devices import DeviceRoutes

__all__ = ["Worker"]


@dataclass(slots=True)
class Worker:
    """The parts of one worker.

    Args:
        info (WorkerInfo): its name and id.
        session (int): of its group; frames of other sessions are refused.
        members (Members): of its group.
        codec (Codec): encodes and decodes.
        devices (DeviceRoutes): its device maps, and those of its peers that concern it.
        rrefs (RRefContext): its RRefs.
        hooks (list[Hook]): the hooks that take part in its calls.
        default_timeout (float | None): in seconds, of calls that name none; None: they have none.
        objects (ObjectStore): the cluster's.
    """

    info: WorkerInfo
    session: int
    members: Members
    codec: Codec
    devices: DeviceRoutes
    rrefs: RRefContext
    hooks: list[Hook]
    default_timeout: float | None
    objects: ObjectStore
