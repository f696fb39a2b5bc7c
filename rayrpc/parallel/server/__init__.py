"""Servers of values, models and gradients: ``machin.parallel.server``."""

from __future__ import annotations

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
