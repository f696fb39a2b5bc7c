"""The world: all processes of a program, by rank and name."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.errors import RpcError
from rayrpc.options import TensorPipeRpcBackendOptions
from rayrpc.parallel.distributed import lookup, registry
from rayrpc.parallel.distributed.barrier import wait_for_members
from rayrpc.parallel.distributed.collective_group import CollectiveGroup
from rayrpc.parallel.distributed.rpc_group import RpcGroup, groups

__all__ = ["World", "get_cur_name", "get_cur_rank", "get_world", "is_world_initialized"]

_world: World | None = None


class World:
    """Join all processes of a program; each makes one.

    Args:
        name (str): of this process, unique.
        rank (int): of this process, from 0; -1: ``RANK`` in the environment.
        world_size (int): number of processes; -1: ``WORLD_SIZE`` in the environment.
        init_dist (bool): initialize ``torch.distributed``.
        init_rpc (bool): initialize RPC; else it is initialized already, with a name and rank.
        dist_backend (str): "gloo" or "nccl".
        dist_init_method (str): URL where the processes meet for ``torch.distributed``.
        rpc_init_method (str): URL that names the RPC group.
        dist_timeout (float): of collective operations, in seconds.
        rpc_timeout (float): of calls, in seconds.

    Raises:
        RuntimeError: this process has a world already, or the group refuses the process.
        ValueError: rank or size is neither given nor in the environment.

    Source: ``machin.parallel.distributed.World``.
    """

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int = -1,
        init_dist: bool = True,
        init_rpc: bool = True,
        dist_backend: str = "gloo",
        dist_init_method: str = "tcp://localhost:9100",
        rpc_init_method: str = "tcp://localhost:9101",
        dist_timeout: float = 60,
        rpc_timeout: float = 60,
    ) -> None:
        global _world
        if _world is not None:
            raise RuntimeError("this process has a world already: stop() it before another")
        if init_rpc:
            rank = rank if rank >= 0 else _from_environment(name, "rank")
            world_size = world_size if world_size > 0 else _from_environment(name, "world_size")
            options = TensorPipeRpcBackendOptions(
                init_method=rpc_init_method, rpc_timeout=rpc_timeout
            )
            api.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        infos = current.get_agent().get_worker_infos()
        self.rank = current.get_agent().info.id
        self.name = current.get_agent().info.name
        self.world_size = len(infos)
        self.rank_name_map = {info.id: info.name for info in infos}
        self.lut_manager = lookup.choose_owner()
        self.rpc_timeout = rpc_timeout
        self.groups = groups
        self.started = True
        self._owns_dist, self._owns_rpc = init_dist, init_rpc
        if init_dist:
            try:
                dist.init_process_group(
                    dist_backend,
                    init_method=dist_init_method,
                    timeout=timedelta(seconds=dist_timeout),
                    rank=self.rank,
                    world_size=self.world_size,
                )
            except BaseException:
                lookup.release_owner()
                if init_rpc:
                    api.shutdown(graceful=False)
                raise
        _world = self

    def __repr__(self) -> str:
        state = "started" if self.started else "stopped"
        groups = "".join(f", group {name!r}" for name in sorted(self.groups))
        return f"<World: {self.name!r} is rank {self.rank} of {self.world_size}, {state}{groups}>"

    def stop(self) -> None:
        """Leave the world, and shut down what it initialized, when all processes do.

        Raises:
            RuntimeError: the world was stopped before.

        Source: ``machin.parallel.distributed.World.stop``.
        """
        global _world
        if not self.started:
            raise RuntimeError(f"the world of {self.name!r} was stopped already")
        self.started = False
        for group in list(self.groups.values()):
            with contextlib.suppress(RpcError):  # the process with the table may have ended
                group.destroy()
        lookup.release_owner()
        try:
            if self._owns_rpc:
                api.shutdown()
        finally:
            if self._owns_dist and dist.is_initialized():
                dist.destroy_process_group()
            self.groups.clear()
            registry.clear()
            _world = None

    def create_collective_group(
        self, ranks: list[int], timeout: float = 60, backend: str | None = None
    ) -> CollectiveGroup:
        """Create a group for collective communication; every process of the world calls this.

        Args:
            ranks (list[int]): of the members.
            timeout (float): of operations, in seconds.
            backend (str, optional): "gloo" or "nccl"; default: the world's.

        Returns:
            CollectiveGroup: of these ranks in ascending order.

        Source: ``machin.parallel.distributed.World.create_collective_group``.
        """
        ranks = sorted(ranks)
        group = dist.new_group(ranks, timedelta(seconds=timeout), backend)
        return CollectiveGroup(group, ranks.index(self.rank) if self.rank in ranks else None)

    def create_rpc_group(self, group_name: str, members: list[str]) -> RpcGroup:
        """Create a group for calls, and wait until all members have.

        Args:
            group_name (str): unique in the world.
            members (list[str]): names of processes, this one among them.

        Returns:
            RpcGroup: of these members.

        Raises:
            RuntimeError: this process is no member, or has the group already.
            WorkerDiedError: a member died.

        Source: ``machin.parallel.distributed.World.create_rpc_group``.
        """
        if self.name not in members:
            raise RuntimeError(
                f"process {self.name!r} cannot create group {group_name!r}: it is not among its "
                f"members {members}"
            )
        if group_name in self.groups:
            raise RuntimeError(f"process {self.name!r} has a group {group_name!r} already")
        group = self.groups[group_name] = RpcGroup(group_name, members)
        try:
            wait_for_members(group_name, group.group_members, "create")
        except BaseException:
            del self.groups[group_name]
            raise
        return group

    def get_ranks(self) -> list[int]:
        """Return the ranks of all processes.

        Source: ``machin.parallel.distributed.World.get_ranks``.
        """
        return list(self.rank_name_map)

    def get_members(self) -> list[str]:
        """Return the names of all processes, by rank.

        Source: ``machin.parallel.distributed.World.get_members``.
        """
        return list(self.rank_name_map.values())

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("a World cannot be sent: make it in each process")


def _from_environment(name: str, what: str) -> int:
    value = os.environ.get(what.upper(), "")
    if not value.isdecimal():
        raise ValueError(
            f"the world of process {name!r} needs its {what}: pass it, or set {what.upper()} in "
            f"the environment, where it is {value!r}"
        )
    return int(value)


def _require_world() -> World:
    if _world is None:
        raise RuntimeError("this process has no world: make a World(name, rank, world_size) first")
    return _world


def get_world() -> World | None:
    """Return this process's world.

    Returns:
        World | None: None before it is made, and after it was stopped.

    Source: ``machin.parallel.distributed.get_world``.
    """
    return _world


def is_world_initialized() -> bool:
    """Tell whether this process has a world.

    Returns:
        bool: False before it is made, and after it was stopped.

    Source: ``machin.parallel.distributed.is_world_initialized``.
    """
    return _world is not None


def get_cur_rank() -> int:
    """Return the rank of this process.

    Returns:
        int: from 0.

    Raises:
        RuntimeError: this process has no world.

    Source: ``machin.parallel.distributed.get_cur_rank``.
    """
    return _require_world().rank


def get_cur_name() -> str:
    """Return the name of this process.

    Returns:
        str: unique in the world.

    Raises:
        RuntimeError: this process has no world.

    Source: ``machin.parallel.distributed.get_cur_name``.
    """
    return _require_world().name
