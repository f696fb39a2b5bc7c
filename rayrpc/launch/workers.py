"""Workers that only serve, started from a notebook or a script."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrpc import api, config, startup
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc.config import WorkerResources
from rayrpc.errors import GroupError, NotInitializedError
from rayrpc.launch.ahead import connect_for_workers
from rayrpc.launch.autoreload import follow_autoreload
from rayrpc.launch.cell_hook import follow_cells_here
from rayrpc.launch.detached import reservation_name
from rayrpc.launch.hosted import HostedWorker
from rayrpc.launch.lifetime import Lifetime
from rayrpc.launch.output import Output
from rayrpc.launch.placement import check_placeable, placed_options, release_placement
from rayrpc.launch.program import Program
from rayrpc.launch.restarts import Restarts, begin_to_serve
from rayrpc.launch.starting import end_hosted, send_folder, start_hosted

__all__ = ["WorkerGroup", "start_beside", "start_into", "start_with", "wanted_by"]

FOR_THIS_PROCESS = Lifetime()
# How long workers that are replaced may take to leave their group.
LEAVE_SECONDS = 10.0


class WorkerGroup:
    """Workers that this process started, as ``rayrpc.start_workers`` returns them.

    ``group[name]`` is the WorkerInfo of one, ``iter(group)`` yields those of all, and
    ``len(group)`` is their number.

    Args:
        agent (Agent): of this process, in their group.
        actors (dict[str, ActorHandle]): by worker.
        placed (dict): by worker, as ``placed_options`` returned them.
        output (Output, optional): what they print; None: Ray has it.
        wanted (dict[str, WorkerResources]): by worker, what it asks for.
        lifetime (Lifetime): of the workers.

    Raises:
        KeyError: by ``group[name]``: no worker of this name was started here.
        NotInitializedError: by ``group[name]`` and by iterating: RPC was shut down.

    Example:
        >>> group = rayrpc.start_workers(["alice", "bob"])
        >>> rayrpc.rpc_sync(group["alice"], torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
        >>> group.stop()

    Source: rayrpc's own.
    """

    def __init__(
        self,
        agent: Agent,
        actors: dict[str, ActorHandle[HostedWorker]],
        placed: dict[str, dict[str, Any]],
        output: Output | None,
        wanted: dict[str, WorkerResources],
        lifetime: Lifetime,
    ) -> None:
        self._agent = agent
        self._wanted = wanted
        self._lifetime = lifetime
        self._actors = actors
        self._placed = placed
        self._output = output
        self._outputs: dict[str, Output] = {}  # of workers that were started again
        self._restarts: Restarts | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def __getitem__(self, name: str) -> WorkerInfo:
        if name not in self._actors:
            raise KeyError(f"no worker {name!r} was started here; there are {list(self._actors)}")
        if self._agent.has_left:
            raise NotInitializedError(current.NOT_INITIALIZED)
        return self._agent.get_worker_info(name)

    def __iter__(self) -> Iterator[WorkerInfo]:
        return (self[name] for name in self._actors)

    def __len__(self) -> int:
        return len(self._actors)

    def __repr__(self) -> str:
        return f"WorkerGroup({', '.join(self._actors)})"

    def _repr_html_(self) -> str:
        return "<i>stopped</i>" if self._agent.has_left else self._agent._repr_html_()

    def stop(self) -> None:
        """End these workers, and release their resources; later calls do nothing.

        They have 5 seconds to leave the group.  ``rpc.shutdown()`` in the process that started
        them ends them, too.
        """
        self._forget()
        if self._restarts is not None:
            self._restarts.stop()
        with self._lock:
            self._stopped = True
            actors, self._actors = self._actors, {}
        if not ray.is_initialized():  # Ray was shut down, and has ended them
            self._close_outputs()
            return
        end_hosted(actors.values())
        release_placement(self._placed)
        self._close_outputs()

    def _forget(self) -> None:
        with contextlib.suppress(ValueError):  # it is stopped twice
            _started.remove(self)

    def _close_outputs(self) -> None:
        for output in (self._output, *self._outputs.values()):
            if output is not None:
                output.close()

    @property
    def _restarting(self) -> list[str]:
        """The names of those that have died and are being started again."""
        return [] if self._restarts is None else self._restarts.starting()

    def _is_as(self, wanted: Mapping[str, WorkerResources], lifetime: Lifetime) -> bool:
        """Tell whether these workers are what a program asks for again; ``on_start`` may differ."""
        alike = dataclasses.replace(lifetime, on_start=self._lifetime.on_start)
        return wanted == self._wanted and alike == self._lifetime

    def _keep_alive(
        self, limit: int, start: Callable[[str, int], tuple[ActorHandle[HostedWorker], Output]]
    ) -> None:
        """Start the workers again that die.

        Args:
            limit: how often each; -1: always.
            start: starts one, given its name and how many starts are left.
        """

        def restart(name: str, left: int) -> None:
            ray.kill(self._actors[name])  # where the group has lost it, but it runs
            actor, output = start(name, left)
            with self._lock:
                stopped = self._stopped
                before = self._outputs.pop(name, None)
                if not stopped:
                    self._actors[name], self._outputs[name] = actor, output
            if stopped:
                ray.kill(actor)
                output.close()
            if before is not None:
                before.close()

        self._restarts = Restarts(self._agent, self._actors, limit, restart)


#: those of groups that this process is in, unless they were stopped
_started: list[WorkerGroup] = []


def start_with(
    settings: config.Settings,
    names: Sequence[str],
    resources: Mapping[str, float | Mapping[str, float]] | None = None,
    me: str = "driver",
    lifetime: Lifetime = FOR_THIS_PROCESS,
    restart: bool = False,
) -> WorkerGroup:
    """Start workers with settings of their own.

    Args:
        settings: of the workers, and of this process where it joins a group.
        names, resources, me, restart: see ``rayrpc.start_workers``.
        lifetime: of the workers.

    Returns:
        WorkerGroup: of the workers, which serve already.

    Raises:
        PlacementError, GroupError, ConfigError: see ``rayrpc.start_workers``.
    """
    wanted = wanted_by(settings, names, resources)
    if not current.is_set():
        if me in names:
            raise GroupError(f"the name {me!r} is this process's: give it another one by me=NAME")
        options = startup.default_options(settings)
        options.init_method = f"ray://group-{uuid.uuid4().hex[:8]}"
        api.init_rpc(me, rpc_backend_options=options)
    return start_beside(current.get_agent(), settings, wanted, lifetime, restart)


def wanted_by(
    settings: config.Settings,
    names: Sequence[str],
    resources: Mapping[str, float | Mapping[str, float]] | None,
) -> dict[str, WorkerResources]:
    """Return what workers ask for, by name; see ``rayrpc.start_workers``.

    Args:
        settings: of the workers.
        names, resources: see ``rayrpc.start_workers``.

    Raises:
        PlacementError, ConfigError, TypeError: see ``rayrpc.start_workers``.
    """
    if isinstance(names, str):
        raise TypeError(f"names must be a list of worker names, got the string {names!r}")
    for name in names:
        WorkerInfo(name, 0)  # checks it
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise GroupError(f"names must be unique, and {', '.join(map(repr, twice))} is there twice")
    connect_for_workers(settings)
    values: dict[str, Any] = dict(resources or {})
    given = None if resources is None else WorkerResources(**values)
    wanted = {name: given or settings.resources_for(name) for name in names}
    check_placeable(wanted)
    return wanted


def start_beside(
    agent: Agent,
    settings: config.Settings,
    wanted: dict[str, WorkerResources],
    lifetime: Lifetime = FOR_THIS_PROCESS,
    restart: bool = False,
) -> WorkerGroup:
    """Start workers in the dynamic group of a worker of this process.

    Args:
        agent (Agent): of this process.
        settings: of the workers.
        wanted: by worker, what it asks for; see ``wanted_by``.
        lifetime: of the workers.
        restart: see ``rayrpc.start_workers``.

    Returns:
        WorkerGroup: of the workers, which serve already.

    Raises:
        PlacementError, GroupError: see ``rayrpc.start_workers``.
    """
    if agent.members.is_static:
        raise GroupError(
            "workers can only be started into a dynamic group: call init_rpc without world_size, "
            "or not at all, before start_workers"
        )
    there = _find_started(agent, wanted, lifetime, restart)
    if there is not None:
        return there
    reserved_for = reservation_name(agent.key) if lifetime.detached else ""
    placed = placed_options(
        wanted, settings.placement_strategy, settings.placement_timeout, reserved_for
    )
    try:
        actors, output = start_into(agent, settings, wanted, placed, lifetime)
    except BaseException:
        release_placement(placed)
        raise
    group = WorkerGroup(agent, actors, placed, output, wanted, lifetime)
    _started.append(group)
    agent.on_shutdown(group._forget if lifetime.detached else group.stop)
    if lifetime.max_restarts:

        def start(name: str, left: int) -> tuple[ActorHandle[HostedWorker], Output]:
            of_one = {name: wanted[name]}, {name: placed[name]}
            shorter = dataclasses.replace(lifetime, max_restarts=left)
            actors, output = start_into(agent, settings, *of_one, shorter)
            assert output is not None  # as it is not detached
            return actors[name], output

        group._keep_alive(lifetime.max_restarts, start)
    follow_autoreload()
    return group


def _find_started(
    agent: Agent, wanted: Mapping[str, WorkerResources], lifetime: Lifetime, restart: bool
) -> WorkerGroup | None:
    """Return the workers that a program asks for again; None: their names are free.

    Raises:
        GroupError: names are taken by others.
    """
    mine = [each for each in list(_started) if each._agent is agent]
    present = {member.name for member in agent.members.all()}
    present.update(*(each._restarting for each in mine))
    for each in mine:
        if present.isdisjoint(each._wanted):  # all have died
            each._forget()
    taken = present.intersection(wanted)
    started = [each for each in mine if not taken.isdisjoint(each._wanted)]
    if not taken:
        return None
    others = taken.difference(*(each._wanted for each in started))
    if others:
        advice = "choose other names, or call those that are there"
    elif any(each._wanted.keys() - wanted.keys() for each in started):
        advice = "ask for all workers that were started together"
    elif restart:
        for each in started:
            each.stop()
        agent.members.wait_until(
            lambda: taken.isdisjoint(member.name for member in agent.members.all()), LEAVE_SECONDS
        )
        return None
    elif len(started) > 1 or started[0]._wanted.keys() != wanted.keys():
        advice = "ask for those alone, or for all anew by restart=True"
    elif taken != wanted.keys():
        advice = "the others have died; restart=True replaces all"
    elif not started[0]._is_as(wanted, lifetime):
        advice = "they have other resources, or another lifetime; restart=True replaces them"
    else:
        return started[0]
    names = ", ".join(map(repr, sorted(taken)))
    raise GroupError(f"{names} of the workers are in group {agent.key!r} already: {advice}")


def start_into(
    agent: Agent,
    settings: config.Settings,
    wanted: Mapping[str, WorkerResources],
    placed: dict[str, dict[str, Any]],
    lifetime: Lifetime = FOR_THIS_PROCESS,
) -> tuple[dict[str, ActorHandle[HostedWorker]], Output | None]:
    """Start workers that join a dynamic group, and wait until they serve.

    Args:
        agent (Agent): of this process; a member of the group.
        settings: of the workers.
        wanted: by worker, what it asks for.
        placed: by worker, as ``placed_options`` returned them.
        lifetime: of the workers.

    Returns:
        The actors by worker, and what they print; close that after they have ended.  None: Ray has
        it.

    Raises:
        PlacementError: a worker was not started in time; the others were ended.
    """
    method = f"ray://{agent.key}"
    program = Program.without_script(settings.working_dir)
    actors, _ = start_hosted(program, settings, wanted, placed)
    output: Output | None = None
    try:
        addresses: Mapping[str, str] = {}
        if not lifetime.detached:
            output = Output(actors, settings, prefixed=True)
            addresses = output.addresses
            if output.takes_marks:
                follow_cells_here(agent)
        folders = send_folder(program, settings, list(actors.values()))
        ray.get(
            [
                actor.join_group.remote(
                    *(name, method, addresses.get(name), folder, lifetime.detached),
                    restarts=lifetime.max_restarts,
                    is_held=lifetime.on_start is not None,
                    marks_cells=output is not None and output.takes_marks,
                )
                for (name, actor), folder in zip(actors.items(), folders, strict=True)
            ]
        )
        # waits until the directory has announced them here
        members = [agent.lookup(name) for name in wanted]
        if lifetime.on_start is not None:
            begin = Invocation(begin_to_serve, (lifetime.on_start,))
            for begun in [agent.caller.future(member, begin, None) for member in members]:
                begun.wait()
    except BaseException:
        for actor in actors.values():
            ray.kill(actor)
        if output is not None:
            output.close()
        raise
    return actors, output
