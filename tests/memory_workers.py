"""Whole workers inside this process, on the in-memory transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rayrpc import api
from rayrpc._protocol.membership import Member
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.rrefs.handle import make_handle
from rayrpc._transports.memory import MemoryDirectory, MemoryHub, MemoryTransport
from rayrpc.options import TensorPipeRpcBackendOptions

WAIT = 60.0


class MemoryWorker:
    """A worker, its agent, and a way to kill it."""

    def __init__(self, hub, name, rank=-1, world_size=None, hooks=(), extra=None, **options):
        token = f"{name}-{time.monotonic_ns()}"
        self.name = name
        self.transport = MemoryTransport(hub, token)
        self.directory = MemoryDirectory(hub, "key")
        request = Member(
            token, name, rank, world_size, self.transport.address, main="program", extra=extra or {}
        )
        self.agent = Agent(
            self.directory.join(request, WAIT),
            self.transport,
            self.directory,
            "key",
            TensorPipeRpcBackendOptions(**options),
            make_handle,
            api.user_api,
        )
        self.agent.hooks += hooks
        self.agent.start()

    @property
    def member(self):
        return self.agent.member

    def sync(self, to, func, *args, timeout=WAIT):
        return self.agent.caller.sync(self.find(to), Invocation(func, args), timeout)

    def future(self, to, func, *args, timeout=WAIT):
        return self.agent.caller.future(self.find(to), Invocation(func, args), timeout)

    def remote(self, to, func, *args, timeout=WAIT):
        return self.agent.caller.remote(self.find(to), Invocation(func, args), timeout)

    def find(self, to):
        return self.agent.lookup(to.name if isinstance(to, MemoryWorker) else to)

    def die(self):
        """Stop serving at once; the others hear of it."""
        self.transport.close()
        self.directory.die("killed by the test")

    @property
    def table(self):
        return self.agent.rrefs._table

    def is_empty(self):
        table = self.table
        return not (table.owned or table.used or table._children) and table.is_settled()


@contextlib.contextmanager
def memory_group() -> Iterator[Callable[..., MemoryWorker]]:
    """Yield what starts the workers of one group; they are shut down at the end."""
    hub = MemoryHub()
    workers: list[MemoryWorker] = []

    def start(name, *args, **options):
        workers.append(MemoryWorker(hub, name, *args, **options))
        return workers[-1]

    try:
        yield start
    finally:
        for worker in workers:
            worker.agent.shutdown()
