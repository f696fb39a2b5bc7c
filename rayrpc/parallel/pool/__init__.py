"""Pools of processes and threads: ``machin.parallel.pool``."""

from rayrpc.parallel.pool.base import BasePool, PoolStates
from rayrpc.parallel.pool.contexts import CtxPoolStorage, proxy_ctx_caller
from rayrpc.parallel.pool.processes import CtxPool, P2PPool, Pool
from rayrpc.parallel.pool.results import (
    AsyncResult,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
)
from rayrpc.parallel.pool.threads import CtxThreadPool, ThreadPool

__all__ = [
    "AsyncResult",
    "BasePool",
    "CtxPool",
    "CtxPoolStorage",
    "CtxThreadPool",
    "IMapIterator",
    "IMapUnorderedIterator",
    "MapResult",
    "P2PPool",
    "Pool",
    "PoolStates",
    "ThreadPool",
    "proxy_ctx_caller",
]
