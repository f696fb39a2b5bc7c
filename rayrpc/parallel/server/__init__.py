"""Servers of values, models and gradients: ``machin.parallel.server``.

A server is made in a process of an ``RpcGroup`` (``...Impl``), and used by a small object that any
process of the world gets by ``group.get_paired(server_name).to_here()``.  The files, in the order
in which pushed gradients meet them:

1. ``grad_server``: gradients of many clients are reduced in a tree, and one model takes steps.
2. ``model_server``: a model's parameters, pushed and pulled...
3. ``ordered_server``: ... as values with versions, each made from the one before it.

Invariants:

- A value is accepted only on top of the newest version, so that no update is lost unnoticed.
- What a client pulls is a copy.
- Gradients are dropped only if more wait than ``max_queue_size``, with a warning.
"""

from __future__ import annotations

from rayrpc.parallel._replaceable import make_replaceable
from rayrpc.parallel.server.grad_server import PushPullGradServer, PushPullGradServerImpl
from rayrpc.parallel.server.model_server import PushPullModelServer, PushPullModelServerImpl
from rayrpc.parallel.server.ordered_server import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
)

__all__ = [
    "OrderedServerBase",
    "OrderedServerSimple",
    "OrderedServerSimpleImpl",
    "PushPullGradServer",
    "PushPullGradServerImpl",
    "PushPullModelServer",
    "PushPullModelServerImpl",
]

make_replaceable(__name__)
