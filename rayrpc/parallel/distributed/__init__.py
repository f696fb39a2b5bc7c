"""Worlds of named processes, and groups in them: ``machin.parallel.distributed``.

Every process of a program makes a ``World``; with the others it creates groups, for calls or for
collective communication.  The files, in the order in which ``group.registered_sync(key)`` meets
them:

1. ``world``: ``World`` initializes RPC and ``torch.distributed``, and creates groups.
2. ``rpc_group``: ``RpcGroup``, calls of members, values and services by keys.
3. ``registry``: holds this process's values and services, and finds those of others...
4. ``lookup``: ... in one table, in the process of the lowest rank.

``barrier`` has members wait for one another, in the same process.

``collective_group`` has ``CollectiveGroup``, which is on torch's process groups alone; ``pending``
has its operations that are under way.

Invariants:

- A value or service is held by one process, and called there; other processes get RRefs.
- A key has one holder; it is free again when the holder has left or died.
- The table's place is fixed when the world is made: when that process dies, look-ups fail.
"""

from __future__ import annotations

from rayrpc.parallel._replaceable import make_replaceable
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

make_replaceable(__name__)
