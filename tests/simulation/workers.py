"""Workers of a simulated group, all in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simulation.primitives import Thread, wait_for_threads
from simulation.scheduler import current

from rayrpc import api
from rayrpc._protocol.membership import Member
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.rrefs.handle import make_handle
from rayrpc._transports.direct.transport import DirectTransport
from rayrpc._transports.memory import MemoryDirectory, MemoryHub, MemoryTransport
from rayrpc.options import TensorPipeRpcBackendOptions

__all__ = ["WORKERS", "Worker", "check_connections", "shut_down", "start_workers", "wait"]

# Of virtual time: no call takes so long, and no thread stays for so long.
CALL_SECONDS = 300.0
END_SECONDS = 120.0


class Worker:
    """A worker of a simulated group: its agent, on the direct transport over simulated connections.

    Args:
        hub (MemoryHub): shared by the workers of the group.
        number (int): its name is ``w`` and the number.
        slots (int): how many functions it runs at a time.
        near (bool): all workers are on one node.
    """

    def __init__(self, hub: MemoryHub, number: int, slots: int, near: bool) -> None:
        self.name = f"w{number}"
        self.is_dead = False
        token = f"token-{number}"
        fallback = MemoryTransport(hub, token, f"127.0.0.{1 if near else number + 1}")
        self.transport = DirectTransport(fallback, token, worker=self.name)
        self.directory = MemoryDirectory(hub, "group")
        me = Member(token, self.name, -1, address=self.transport.address, node=fallback.node)
        self.agent = Agent(
            self.directory.join(me, CALL_SECONDS),
            self.transport,
            self.directory,
            "group",
            TensorPipeRpcBackendOptions(num_worker_threads=slots),
            make_handle,
            api.user_api,
        )
        self.agent.start()

    def sync(self, to: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a worker; return its value."""
        return self.agent.caller.sync(
            self.find(to), Invocation(function, (to, *args)), CALL_SECONDS
        )

    def future(self, to: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a worker; return its Future."""
        return self.agent.caller.future(
            self.find(to), Invocation(function, (to, *args)), CALL_SECONDS
        )

    def remote(self, to: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on another worker, which keeps the value; return the RRef."""
        return self.agent.caller.remote(
            self.find(to), Invocation(function, (to, *args)), CALL_SECONDS
        )

    def find(self, to: int) -> Member:
        """Return a worker as a member of the group."""
        return self.agent.lookup(f"w{to}")

    def die(self) -> None:
        """Stop at once; the others hear of it."""
        self.is_dead = True
        self.transport.close()
        self.directory.die("killed by the scenario")
        self.agent.caller.close()  # its own users end with it


def start_workers(count: int, slots: int = 16, near: bool = False) -> list[Worker]:
    """Start a group; its workers are in ``WORKERS``."""
    hub = MemoryHub()
    WORKERS[:] = [Worker(hub, number, slots, near) for number in range(count)]
    return WORKERS


def check_connections(transports: Iterable[DirectTransport]) -> None:
    """Check that no call went by the fallback for want of a connection."""
    for transport in transports:
        for route in transport.routes().values():
            assert not route.reason, route.reason


def shut_down(leave: Callable[[Worker], None]) -> None:
    """Have all workers leave, each in a thread, and wait until all threads have ended.

    Args:
        leave: shuts a worker down.
    """
    threads = [Thread(target=leave, name=f"{each.name} leaves", args=(each,)) for each in WORKERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    WORKERS.clear()
    wait_for_threads(END_SECONDS)


def wait(future: Any) -> Any:
    """Return the value of a torch Future, whose own ``wait`` is not simulated."""
    done: list[bool] = []
    future.add_done_callback(lambda _: done.append(True))
    assert current().step("waits for a Future", lambda: bool(done), 2 * CALL_SECONDS), "no reply"
    return future.value()


#: the workers of the run: the functions that are called have no other way to find their own
WORKERS: list[Worker] = []
