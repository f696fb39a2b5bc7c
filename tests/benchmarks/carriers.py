"""What carries the calls: RPC as torch has it, or Ray's own actor calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from measures import SMALL_LOADS, Calls, Effort, floats, measure

__all__ = ["Plain", "PlainCaller", "RawCalls", "RpcCalls", "function", "measure_rpc", "wires"]


def same(value: Any) -> Any:
    """Be the function that is called."""
    return value


class Counter:
    """Be the object whose method is called through an RRef."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        """Count."""
        self.count += number
        return self.count


def function(load: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and the arguments of a load."""
    import torch

    if load == "int":
        return same, (1,)
    if load == "tensor":
        return same, (torch.ones(2),)
    if load == "add":
        return torch.add, (torch.ones(2), torch.ones(2))
    tensors = {name: torch.ones(size) for name, size in floats(load).items()}
    return same, (tensors.get("", tensors),)


class RpcCalls(Calls):
    """Call by ``rpc_sync``, ``rpc_async``, ``remote``.

    Args:
        rpc: the module, rayrpc or ``torch.distributed.rpc``.
        to: name of the callee.
    """

    def __init__(self, rpc: Any, to: str) -> None:
        self._rpc = rpc
        self._to = to

    def prepare(self, load: str) -> tuple[Any, ...]:
        return function(load)

    def sync(self, *prepared: Any) -> Any:
        func, args = prepared
        return self._rpc.rpc_sync(self._to, func, args=args)

    def start(self, *prepared: Any) -> Any:
        func, args = prepared
        return self._rpc.rpc_async(self._to, func, args=args)

    def wait(self, started: list[Any]) -> None:
        for future in started:
            future.wait()

    def keep_and_fetch(self, *prepared: Any) -> Any:
        func, args = prepared
        return self._rpc.remote(self._to, func, args=args).to_here()

    def method(self) -> Callable[[], Any]:
        counter = self._rpc.remote(self._to, Counter)
        return lambda: counter.rpc_sync().add(1)


def measure_rpc(module: str, to: str, row: str, effort: Effort) -> float:
    """Measure a row from this worker; sent to one that is to be the caller."""
    return measure(row, RpcCalls(importlib.import_module(module), to), effort)


# -- Ray alone ----------------------------------------------------------------------------------


class Plain:
    """Be the callee: an actor without anything."""

    def __init__(self) -> None:
        self._kept: Any = None

    def same(self, value: Any) -> Any:
        """Send back what came."""
        return value

    def keep(self, value: Any) -> None:
        """Keep what came."""
        self._kept = value

    def kept(self, _: Any) -> Any:
        """Send back what was kept."""
        return self._kept


def wires() -> dict[str, bytes]:
    """Return by small load what a raw actor call carries: the very bytes that rayrpc sends."""
    from rayrpc._protocol.messages import Frame, Kind
    from rayrpc._runtime.serialization.codec import Codec

    codec = Codec(None)  # type: ignore[arg-type]  # no RRefs here
    carried: dict[str, bytes] = {}
    for load in SMALL_LOADS:
        func, args = function(load)
        payload = codec.encode((func, args, {}), 1, True)
        assert not payload.buffers
        carried[load] = Frame(Kind.CALL, 1, 0, 1, data=payload.data).pack()
    return carried


class RawCalls(Calls):
    """Call a ``Plain`` actor; large tensors are numpy arrays, Ray's best case.

    Args:
        actor: handle of it.
        carried: what ``wires`` returned.
    """

    def __init__(self, actor: Any, carried: dict[str, bytes]) -> None:
        import ray

        self._actor = actor
        self._carried = carried
        self._get = ray.get

    def prepare(self, load: str) -> tuple[Any, ...]:
        if load in self._carried:
            return (self._carried[load],)
        import numpy as np

        arrays = {name: np.ones(size, dtype=np.float32) for name, size in floats(load).items()}
        return (arrays.get("", arrays),)

    def sync(self, *prepared: Any) -> Any:
        return self._get(self._actor.same.remote(*prepared))

    def start(self, *prepared: Any) -> Any:
        return self._actor.same.remote(*prepared)

    def wait(self, started: list[Any]) -> None:
        self._get(started)

    def keep_and_fetch(self, *prepared: Any) -> Any:
        # two calls, as there; Ray keeps them in order, so that only the second is waited for
        self._actor.keep.remote(*prepared)
        return self._get(self._actor.kept.remote(*prepared))

    def method(self) -> Callable[[], Any]:
        prepared = self.prepare("int")
        return lambda: self.sync(*prepared)


class PlainCaller:
    """Be the caller: another actor without anything.

    Args:
        actor: the callee.
        carried: what ``wires`` returned.
    """

    def __init__(self, actor: Any, carried: dict[str, bytes]) -> None:
        self._calls = RawCalls(actor, carried)

    def measure(self, row: str, effort: Effort) -> float:
        """Measure a row from here."""
        return measure(row, self._calls, effort)
