"""Pools of processes and threads: ``machin.parallel.pool``.

``pool.map(func, elements)`` becomes tasks, which workers run; what their results come to is
returned.  A ``Pool``'s workers are Ray actors on all nodes of the cluster, a ``ThreadPool``'s are
threads.  The files, in the order in which a task of a ``Pool`` meets them:

1. ``calls``: ``apply``, ``map``, ``imap``... make tasks of a call.
2. ``base``: ``BasePool`` submits them, hands results to the calls, and ends; its two threads wait
   for results and look after workers.
3. ``processes``: ``Pool``, ``P2PPool`` and ``CtxPool`` start the workers.
4. ``scheduler``: decides which worker gets which task; pure.
5. ``task_codec``: encodes tasks and results.
6. ``worker``: the worker's process requests tasks by a call that reports the last results.
7. ``tasks``: what a task is, and the loop that runs tasks.
8. ``results``: ``AsyncResult``, ``MapResult`` and the iterators.

``threads`` has ``ThreadPool`` and ``CtxThreadPool``, whose tasks go through a queue instead of
3 to 6.  ``contexts`` adds a worker's context to its tasks.

Invariants:

- A task is run once, unless its worker did not receive it; its result is delivered once.
- The tasks that a worker was given fail when it dies; tasks that are still queued do not.
- Tasks share no objects, though several may be in one message.
- A result does not wait for a task behind it in its worker for long: an overdue worker is asked
  for the results that it keeps and, if others are idle, for the tasks that it has not begun.
"""

from rayrpc.parallel._replaceable import make_replaceable
from rayrpc.parallel.pickle import dumps, loads
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
    "dumps",
    "loads",
    "proxy_ctx_caller",
]

make_replaceable(__name__)
