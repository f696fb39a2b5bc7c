"""Start the actors of workers, send them the program's folder, and end them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrpc import config
from rayrpc._transports.ray import ray_api
from rayrpc.config import WorkerResources
from rayrpc.launch.folder import Archive, pack
from rayrpc.launch.hosted import CONCURRENCY_GROUPS, HostedWorker
from rayrpc.launch.placement import named, this_node, wait_placed
from rayrpc.launch.preloading import torch_loaded
from rayrpc.launch.program import Program

__all__ = ["end_hosted", "send_folder", "start_hosted"]

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0  # to leave the group, and to send the rest of the output

# The folder that was sent last, by Ray job and content.
_sent: dict[tuple[str, str], ray.ObjectRef[Archive]] = {}


def start_hosted(
    program: Program,
    settings: config.Settings,
    wanted: Mapping[str, WorkerResources],
    placed: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, ActorHandle[HostedWorker]], dict[str, int]]:
    """Start one actor for each worker, and wait until all run.

    Args:
        program: what the workers run.
        settings: of the workers.
        wanted: by worker, what it asks for.
        placed: Ray's options by worker, as ``placed_options`` returns them.

    Returns:
        The actors, and their process ids, by worker.

    Raises:
        PlacementError: one did not start in time; the others are ended.
    """
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups=CONCURRENCY_GROUPS)(HostedWorker)
    own = settings.replace(log_dir=None)  # its files are those of the process that starts it
    shared = (program, this_node(), own.to_dict())
    with torch_loaded(program.environ):
        actors: dict[str, ActorHandle[HostedWorker]] = {
            worker: actor_class.options(**options, **named(worker, settings)).remote(
                worker, *shared
            )
            for worker, options in placed.items()
        }
        try:
            return actors, wait_placed(actors, wanted, settings.placement_timeout)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise


def end_hosted(actors: Collection[ActorHandle[HostedWorker]]) -> None:
    """End workers; they have 5 seconds to leave their group.

    Args:
        actors: the workers.
    """
    leaving = [ray_api.submit(actor.leave_group) for actor in actors]
    if leaving:
        ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_SECONDS)
    for actor in actors:
        ray.kill(actor)


def send_folder(
    program: Program, settings: config.Settings, actors: Sequence[ActorHandle[HostedWorker]]
) -> list[ray.ObjectRef[Archive] | None]:
    """Make the program's folder ready for the workers whose nodes do not have it.

    Args:
        program: what the workers run.
        settings: say what is left out.
        actors: the workers.

    Returns:
        By worker, the archive for ``run`` and ``join_group``, if its node needs it.

    Raises:
        ConfigError: one needs it, and it is too large.
    """
    if not program.folder or "working_dir" in (settings.runtime_env or {}):
        return [None] * len(actors)
    lacking = ray.get([actor.lacks_folder.remote() for actor in actors])
    if not any(lacking):
        return [None] * len(actors)
    archive = pack(program.folder, settings.working_dir_excludes)
    key = (ray.get_runtime_context().get_job_id(), archive.digest)
    if key not in _sent:
        logger.info("sending %s to hosts that do not have it", program.folder)
        _sent.clear()  # a program that changes would fill Ray's object store
        _sent[key] = ray.put(archive)
    return [_sent[key] if lacks else None for lacks in lacking]
