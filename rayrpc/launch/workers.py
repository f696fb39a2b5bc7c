"""Workers that only serve, started from a notebook or a script."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from rayrpc import api, compat, config, startup
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._transports.ray.cluster import connect
from rayrpc.config import WorkerResources
from rayrpc.errors import GroupError
from rayrpc.launch.hosted import hosted_actor
from rayrpc.launch.output import follow
from rayrpc.launch.placement import (
    check_placeable,
    free_group,
    named,
    placed_options,
    this_node,
    wait_placed,
)
from rayrpc.launch.program import Program

__all__ = ["WorkerGroup", "start_into", "start_with", "start_workers"]


class WorkerGroup:
    """Workers that this process started; index by name, iterate over their WorkerInfo.

    Args:
        actors: by worker name.
        placed: the options that ``placed_options`` gave for them.
    """

    def __init__(self, actors: dict[str, Any], placed: dict[str, dict[str, Any]]) -> None:
        self._actors = actors
        self._placed = placed

    def __getitem__(self, name: str) -> WorkerInfo:
        if name not in self._actors:
            raise KeyError(f"no worker {name!r} was started here; there are {list(self._actors)}")
        return api.get_worker_info(name)

    def __iter__(self) -> Iterator[WorkerInfo]:
        return (api.get_worker_info(name) for name in self._actors)

    def __len__(self) -> int:
        return len(self._actors)

    def __repr__(self) -> str:
        return f"WorkerGroup({', '.join(self._actors)})"

    def _repr_html_(self) -> str:
        if not current.is_set():
            return "<i>stopped</i>"
        return str(current.get_agent()._repr_html_())

    def stop(self) -> None:
        """End these workers; ``rpc.shutdown()`` in the process that started them does, too."""
        actors, self._actors = self._actors, {}
        if not ray.is_initialized():  # any more: they ended with it
            return
        refs = [actor.leave_group.remote() for actor in actors.values()]
        ray.wait(refs, num_returns=len(refs), timeout=5)
        for actor in actors.values():
            ray.kill(actor)
        free_group(self._placed)


def start_workers(
    names: Sequence[str],
    resources: Mapping[str, Any] | None = None,
    me: str = "driver",
) -> WorkerGroup:
    """Start workers that serve calls, as Ray actors, and join their group.

    If RPC is not initialized in this process, it becomes a member of a new dynamic group; the
    workers join that, or the dynamic group that this process is in.

    Args:
        names (list[str]): of the workers, unique.
        resources (dict, optional): what each asks Ray for: ``num_cpus``, ``num_gpus``,
            ``memory`` and ``resources``; not given, what the setting ``workers`` says.
        me (str): name of this process, if it is not in a group yet.

    Returns:
        WorkerGroup: of the new workers.

    Raises:
        PlacementError: a worker asks for resources that no node has.
        GroupError: this process is in a group of fixed size, or a name is taken.
    """
    if isinstance(names, str):
        raise TypeError(f"names must be a list of worker names, got the string {names!r}")
    return start_with(config.settings(), names, resources, me)


def start_with(
    settings: config.Settings,
    names: Sequence[str],
    resources: Mapping[str, Any] | None = None,
    me: str = "driver",
) -> WorkerGroup:
    """Start workers with settings of their own; see ``start_workers``."""
    for name in names:
        WorkerInfo(name, 0)  # checks it
    connect(settings)
    given = None if resources is None else WorkerResources(**resources)
    wanted = {name: given or settings.resources_for(name) for name in names}
    check_placeable(wanted)
    if not current.is_set():
        options = startup.default_options(settings)
        options.init_method = f"ray://group-{uuid.uuid4().hex[:8]}"
        api.init_rpc(me, rpc_backend_options=options)
    agent = current.get_agent()
    if agent.is_static_group:
        raise GroupError(
            "workers can only be started into a dynamic group: call init_rpc without world_size, "
            "or not at all, before start_workers"
        )
    placed = placed_options(wanted, settings.placement_strategy, settings.placement_timeout)
    try:
        actors = start_into(agent, settings, wanted, placed)
    except BaseException:
        free_group(placed)
        raise
    group = WorkerGroup(actors, placed)
    agent.on_shutdown(group.stop)
    return group


def start_into(
    agent: Agent,
    settings: config.Settings,
    wanted: Mapping[str, WorkerResources],
    placed: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Start workers that join a dynamic group; return their actors by name.

    Args:
        agent (Agent): a member of the group, of this process.
        settings: of the workers.
        wanted: what each asks for.
        placed: the options that ``placed_options`` gave for them.

    Raises:
        PlacementError: a worker was not started in time; none is left.
    """
    method = f"ray://{agent.key}"
    shared = (
        Program.without_script(),
        this_node(),
        settings.to_dict(),
        compat.is_installed(),
        settings.log_to_terminal,
    )
    worker = hosted_actor()
    actors = {
        name: worker.options(**placed[name], **named(name, settings)).remote(name, *shared)
        for name in wanted
    }
    try:
        wait_placed(actors, wanted, settings.placement_timeout)
        for name, actor in actors.items():
            follow(actor, ray.get, f"({name}) ")
        ray.get([actor.join_group.remote(name, method) for name, actor in actors.items()])
        for name in wanted:
            agent.lookup(name)  # its news may still be on the way
    except BaseException:
        for actor in actors.values():
            ray.kill(actor)
        raise
    return actors
