"""Worlds of named processes, and their groups: ``machin.parallel.distributed``."""

from __future__ import annotations

from rayrpc.parallel.distributed.collective_group import CollectiveGroup
from rayrpc.parallel.distributed.rpc_group import RpcGroup
from rayrpc.parallel.distributed.world import (
    World,
    get_cur_name,
    get_cur_rank,
    get_world,
    is_world_initialized,
)

__all__ = [
    "CollectiveGroup",
    "RpcGroup",
    "World",
    "get_cur_name",
    "get_cur_rank",
    "get_world",
    "is_world_initialized",
]
