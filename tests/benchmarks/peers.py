"""The columns of the benchmark: a caller and a callee, and what is between them.

Each lives in a process of its own, which is the caller or has started it.  A further system is
one more ``Peer`` here.
"""

from __future__ import annotations

import abc
import importlib
import logging
import os
import socket
import uuid
import warnings
from typing import Any, ClassVar

from carriers import Plain, PlainCaller, RawCalls, RpcCalls, measure_rpc, wires
from children import Child
from measures import Effort, measure

__all__ = ["PEERS", "ROLES", "Member", "Peer"]


class Member(abc.ABC):
    """What a process of the benchmark does, beside waiting.

    Args:
        address: where members of one group meet.
    """

    def __init__(self, address: str = "") -> None:
        self.address = address

    @abc.abstractmethod
    def setup(self) -> None:
        """Start or join what is needed."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it, also after ``setup`` failed halfway."""


class Peer(Member):
    """A column."""

    #: names the column in the chart
    title: ClassVar[str]
    #: columns, by role, that this one is compared with
    against: ClassVar[tuple[str, ...]] = ()
    #: takes CPU time when it is idle, too: while others are measured, its process group is stopped
    spins: ClassVar[bool] = False

    @abc.abstractmethod
    def measure(self, row: str, effort: Effort) -> float:
        """Return the result of a row."""


# -- Ray alone ----------------------------------------------------------------------------------


class RawFromDriver(Peer):
    """Actor calls from a process that is attached to the cluster."""

    title = "Ray actor call from a driver"

    def setup(self) -> None:
        import ray

        ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        self._actor: Any = ray.remote(num_cpus=0)(Plain).remote()
        self._calls = RawCalls(self._actor, wires())

    def measure(self, row: str, effort: Effort) -> float:
        return measure(row, self._calls, effort)

    def close(self) -> None:
        import ray

        ray.shutdown()


class RawFromActor(RawFromDriver):
    """Actor calls from another actor."""

    title = "Ray actor call"
    against = ("tensorpipe",)

    def setup(self) -> None:
        super().setup()
        import ray

        self._caller: Any = ray.remote(num_cpus=0)(PlainCaller).remote(self._actor, wires())

    def measure(self, row: str, effort: Effort) -> float:
        import ray

        return float(ray.get(self._caller.measure.remote(row, effort)))


# -- rayrpc -------------------------------------------------------------------------------------


class Hosted(Peer):
    """rayrpc between two hosted workers."""

    title = "rayrpc, hosted"
    against = ("raw-actor", "tensorpipe")

    def setup(self) -> None:
        import rayrpc as rpc

        rpc.start_workers(["alice", "bob"])

    def measure(self, row: str, effort: Effort) -> float:
        import rayrpc as rpc

        args = ("rayrpc", "bob", row, effort)
        return float(rpc.rpc_sync("alice", measure_rpc, args=args, timeout=0))

    def close(self) -> None:
        _leave("rayrpc")


class AttachedCallee(Member):
    """Serve, as a process that is attached."""

    name = "callee"

    def setup(self) -> None:
        import rayrpc as rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=self.address)
        rpc.init_rpc(self.name, rpc_backend_options=options)

    def close(self) -> None:
        _leave("rayrpc")


class Attached(AttachedCallee, Peer):
    """rayrpc between two processes that are attached."""

    name = "caller"
    title = "rayrpc, attached"
    against = ("raw-driver", "tensorpipe")
    _callee: Child | None = None

    def setup(self) -> None:
        import rayrpc as rpc

        self.address = f"ray://bench-{uuid.uuid4().hex[:8]}"
        super().setup()
        self._callee = Child("attached-callee", "--address", self.address)
        self._callee.wait_ready()
        self._calls = RpcCalls(rpc, AttachedCallee.name)

    def measure(self, row: str, effort: Effort) -> float:
        return measure(row, self._calls, effort)

    def close(self) -> None:
        if self._callee is not None:
            self._callee.close()
        super().close()


def _leave(module: str, graceful: bool = False) -> None:
    rpc = importlib.import_module(module)
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown(graceful=graceful)


# -- torch --------------------------------------------------------------------------------------


class TensorPipeServer(Member):
    """Serve, by torch's own RPC."""

    name, rank = "server", 0

    def setup(self) -> None:
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # by torch itself
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=self.address)
        rpc.init_rpc(self.name, rank=self.rank, world_size=2, rpc_backend_options=options)

    def close(self) -> None:
        _leave("torch.distributed.rpc", graceful=True)


class TensorPipe(TensorPipeServer, Peer):
    """Torch's own RPC between two processes; rayrpc is not there."""

    name, rank = "client", 1
    title = "TensorPipe"
    spins = True  # its shared-memory transport polls, by half a core and more a process
    _server: Child | None = None

    def setup(self) -> None:
        from torch.distributed import rpc

        os.setpgrp()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._server = Child("tensorpipe-server", "--address", self.address)
        super().setup()
        self._server.wait_ready()
        self._calls = RpcCalls(rpc, TensorPipeServer.name)

    def measure(self, row: str, effort: Effort) -> float:
        return measure(row, self._calls, effort)

    def close(self) -> None:
        if self._server is None:
            return
        self._server.release()  # the two leave together
        super().close()
        self._server.close()


# -- Monarch ------------------------------------------------------------------------------------


class Monarch(Peer):
    """Monarch, between this process and one that it starts; left out where it is not installed."""

    title = "Monarch"
    against = ("tensorpipe",)
    _procs: Any = None

    def setup(self) -> None:
        from monarch_calls import MonarchCalls, start

        self._procs, actor = start()
        self._calls = MonarchCalls(actor)
        self._calls.sync(*self._calls.prepare("int"))

    def measure(self, row: str, effort: Effort) -> float:
        return measure(row, self._calls, effort)

    def close(self) -> None:
        if self._procs is not None:
            self._procs.stop().get()


PEERS: dict[str, type[Peer]] = {
    "raw-actor": RawFromActor,
    "hosted": Hosted,
    "raw-driver": RawFromDriver,
    "attached": Attached,
    "tensorpipe": TensorPipe,
    "monarch": Monarch,
}
ROLES: dict[str, type[Member]] = {
    **PEERS,
    "attached-callee": AttachedCallee,
    "tensorpipe-server": TensorPipeServer,
}
