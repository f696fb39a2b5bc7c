"""RRefs: references to values that live on some worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.futures import Future

from rayrpc._autograd.leader import run_backward
from rayrpc._concurrency.latency_profile import profiled_by_name
from rayrpc._concurrency.outcome import Error, Value, complete, fresh
from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._protocol.messages import Fork
from rayrpc._runtime import current
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.serialization.codec import add_reducer, reduce_rref
from rayrpc.errors import CallTimeoutError, RpcError
from rayrpc.functions import async_execution
from rayrpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from rayrpc._runtime.agent import Agent
    from rayrpc._runtime.rrefs.context import RRefContext

__all__ = ["PyRRef", "RRef", "RRefProxy", "rref_maker"]

T = TypeVar("T")


class RRef(Generic[T]):
    """Reference a value on this worker, so that it can be shared with others.

    References to values on other workers come from ``remote`` and from calls.

    Args:
        value (object): the value.
        type_hint (type, optional): accepted for TorchScript's sake.

    Raises:
        RuntimeError: RPC is not initialized.

    Source: ``torch.distributed.rpc.RRef``.
    """

    __slots__ = (
        "__weakref__",
        "_agent",
        "_cell",
        "_creation",
        "_fork_id",
        "_future",
        "_owner",
        "_profiling",
        "_rref_id",
        "_type",
    )

    _agent: Agent
    _cell: Cell | None
    _creation: Cell | None
    _fork_id: GloballyUniqueId | None
    _owner: WorkerInfo
    _rref_id: GloballyUniqueId

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current.get_agent()
        self._fill(agent, agent.rrefs.new_id(), None, agent.info, Cell(Value(value)))

    def _fill(
        self,
        agent: Agent,
        rref_id: GloballyUniqueId,
        fork_id: GloballyUniqueId | None,
        owner: WorkerInfo,
        cell: Cell | None,
    ) -> None:
        self._agent = agent
        self._rref_id = rref_id
        self._fork_id = fork_id
        self._owner = owner
        self._cell = cell
        self._creation = None
        self._future = None
        self._profiling = None
        self._type = None

    def __del__(self) -> None:
        fork_id = getattr(self, "_fork_id", None)
        if fork_id is not None:
            self._agent.rrefs.drop(fork_id)

    # -- who and where ------------------------------------------------------------------------

    def is_owner(self) -> bool:
        """Tell whether this worker owns the value."""
        return self._cell is not None

    def owner(self) -> WorkerInfo:
        """Return the WorkerInfo of the worker that owns the value."""
        return self._owner

    def owner_name(self) -> str:
        """Return the name of the worker that owns the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Tell whether the owner is known to count this reference."""
        return self._fork_id is None or self._agent.rrefs.is_confirmed(self._fork_id)

    # -- the value ----------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value: itself on the owner, else a copy.

        Args:
            timeout (float): in seconds; 0: none; not given: the default of calls.

        Raises:
            CallTimeoutError: it took longer, or its creation had timed out.
            WorkerDiedError: the owner is gone.
            Exception: what the creating call raised.
        """
        if self._cell is not None:
            return self.local_value()
        self._check("to_here() on it")
        self._raise_creation_error()
        owner = self._agent.lookup(self._owner)
        seconds = self._agent.resolve_timeout(timeout)
        return self._agent.caller.fetch(owner, self._rref_id, seconds)  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """Return the value itself; only on its owner.

        Raises:
            RuntimeError: this worker is not the owner.
        """
        if self._cell is None:
            raise RuntimeError(
                f"For UserRRef(rref_id={self._rref_id}, fork_id={self._fork_id}), can't call "
                f"localValue() on user {self._agent.info}. Call it on owner {self._owner}"
            )
        return self._cell.wait().unwrap()  # type: ignore[no-any-return]

    def _raise_creation_error(self) -> None:
        outcome = None if self._creation is None else self._creation.outcome
        if isinstance(outcome, Error) and isinstance(outcome.error, CallTimeoutError):
            raise CallTimeoutError(
                "RRef creation via rpc.remote timed out, and it is possible that the RRef on the "
                f"owner node does not exist: {outcome.error}"
            ) from fresh(outcome.error)

    def _check(self, action: str) -> None:
        if self._fork_id is not None and not self._agent.rrefs.is_held(self._fork_id):
            lost = self._agent.death_of_owner(self._owner)
            if lost is not None and current.is_set() and current.get_agent() is self._agent:
                raise lost
            raise RpcError(
                f"User RRef with RRefId={self._rref_id} and ForkId={self._fork_id} has been "
                f"deleted. Cannot call {action} after deletion."
            )

    # -- calls on the value -------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the value, at its owner, and return the result.

        Args:
            timeout (float): of each call in seconds.
        """
        from rayrpc import api

        return RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the value, at its owner, and return Futures.

        Args:
            timeout (float): of each call in seconds.
        """
        from rayrpc import api

        return RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the value, at its owner, and return RRefs.

        Args:
            timeout (float): of each call in seconds.
        """
        from rayrpc import api

        return RRefProxy(self, api.remote, timeout)

    def lazy(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return what becomes the value when it is first used; it is sent as a reference.

        Args:
            timeout (float): of bringing it here, in seconds; 0: none; not given: the default.

        Returns:
            ``LazyRemote``.
        """
        from rayrpc._jit.awaitable import LazyRemote

        return LazyRemote(self, timeout)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a Future of it; asked for once."""
        future = self._type
        if future is None:
            if self._cell is not None:
                future = _typeof_on_owner(self, False)
            else:
                from rayrpc import api

                self._check("_get_type() on it")
                self._raise_creation_error()
                future = api.rpc_async(
                    self._owner, _rref_typeof_on_owner, args=(self,), timeout=timeout
                )
            self._type = future
        if not blocking:
            return future
        try:
            return future.wait()
        except BaseException:
            self._type = None  # ask again next time
            raise

    def _get_future(self) -> Any:
        """Return a Future that completes when the owner made the value."""
        if self._future is None:
            future: Any = Future()
            self._future = future
            if self._creation is None:
                future.set_result(None)
            else:
                soon = self._agent.caller.soon
                self._creation.on_done(lambda done: soon(lambda: complete(future, done)))
        return self._future

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling = future

    def _get_profiling_future(self) -> Any:
        return self._profiling

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar tensor, at its owner.

        Args:
            dist_autograd_ctx_id (int): a context of distributed autograd; not given: a local pass,
                which only the owner may run.
            retain_graph (bool): keep the graph for another pass.

        Raises:
            RuntimeError: the value is no tensor, or the pass failed.
        """
        if self._cell is None:
            if dist_autograd_ctx_id == -1:
                raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            from rayrpc import api

            args = (self, dist_autograd_ctx_id, retain_graph)
            api.rpc_sync(self._owner, _backward_on_owner, args=args)
            return
        value: Any = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RpcError("RRef should contain a tensor for .backward()")
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)
        else:
            run_backward(dist_autograd_ctx_id, [value], retain_graph)

    # -- travelling ---------------------------------------------------------------------------

    def _share(self, rrefs: RRefContext, to: int | None) -> Fork:
        if self._cell is not None:
            return rrefs.share_owned(self._rref_id, self._cell, to)
        assert self._fork_id is not None
        self._check("fork an UserRRef")
        self._raise_creation_error()
        return rrefs.share_used(self._fork_id, to)

    def _lend(self, rrefs: RRefContext, to: int | None) -> GloballyUniqueId | None:
        if self._fork_id is None or not rrefs.is_counted(self._fork_id, to):
            return None
        failed = self._creation is not None and isinstance(self._creation.outcome, Error)
        return None if failed else self._rref_id

    def _serialize(self) -> tuple[Any, ...]:
        """Return a fork as a tuple, for picklers of libraries."""
        return tuple(self._share(self._agent.rrefs, None))

    @staticmethod
    def _deserialize(fork: tuple[Any, ...]) -> RRef[Any]:
        """Return the RRef that a tuple of ``_serialize`` is a fork of."""
        rref_id, fork_id, owner, parent = fork
        return current.get_agent().rrefs.receive(  # type: ignore[no-any-return]
            Fork(GloballyUniqueId(*rref_id), GloballyUniqueId(*fork_id), owner, parent)
        )

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __str__(self) -> str:
        if self._cell is not None:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork_id})"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = {
            "RRef": str(self._rref_id),
            "owner": f"{self._owner.name} (id {self._owner.id})",
            "here": "owner" if self.is_owner() else "user",
            "confirmed": "yes" if self.confirmed_by_owner() else "not yet",
        }
        cells = "".join(f"<tr><th>{key}</th><td>{text}</td></tr>" for key, text in rows.items())
        return f"<table>{cells}</table>"


#: torch's name of the class below RRef; programs use either
PyRRef = RRef

add_reducer(RRef, reduce_rref)


def rref_maker(agent: Agent) -> Callable[..., RRef[Any]]:
    """Return what makes the agent's handles of RRefs."""

    def make(
        rref_id: GloballyUniqueId,
        fork_id: GloballyUniqueId | None,
        owner: int,
        cell: Cell | None,
    ) -> RRef[Any]:
        rref: RRef[Any] = RRef.__new__(RRef)
        rref._fill(agent, rref_id, fork_id, agent.info_of(owner), cell)
        return rref

    return make


# -- proxies ----------------------------------------------------------------------------------


def _typeof_on_owner(rref: RRef[Any], blocking: bool) -> Any:
    kind = type(rref.local_value())
    if blocking:
        return kind
    future: Any = Future()
    future.set_result(kind)
    return future


def _backward_on_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    return _typeof_on_owner(rref, blocking)


@profiled_by_name
def _local_invoke(rref: RRef[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@profiled_by_name
@async_execution
def _local_invoke_async_execution(rref: RRef[Any], func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


class RRefProxy:
    """Call methods of a value where it lives.

    Args:
        rref (RRef): references the value.
        rpc_api (Callable): ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout (float): of each call in seconds.
    """

    def __init__(
        self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return functools.partial(_invoke, self, func_name)


def _invoke(proxy: RRefProxy, func_name: str, /, *args: Any, **kwargs: Any) -> Any:
    rref, rpc_api, timeout = proxy.rref, proxy.rpc_api, proxy.rpc_timeout

    def call(kind: type) -> Any:
        func = _local_invoke
        # only the method itself knows whether it returns a Future; scripted ones never do
        scripted = issubclass(kind, torch.jit.ScriptModule)
        if not scripted and hasattr(getattr(kind, func_name), "_wrapped_async_rpc_function"):
            func = _local_invoke_async_execution
        return rpc_api(rref.owner(), func, args=(rref, func_name, args, kwargs), timeout=timeout)

    from rayrpc import api

    if rpc_api is not api.rpc_async:
        return call(rref._get_type(timeout=timeout))
    kind = rref._get_type(timeout=timeout, blocking=False)
    if kind.done():
        try:
            return call(kind.value())
        except Exception as exc:
            failed: Any = Future()
            failed.set_exception(exc)
            return failed
    result: Any = Future()

    def finish(done: Any) -> None:
        try:
            result.set_result(done.value())
        except Exception as exc:
            result.set_exception(exc)

    def type_known(done: Any) -> None:
        try:
            call(done.value()).add_done_callback(finish)
        except Exception as exc:
            result.set_exception(exc)

    kind.add_done_callback(type_known)
    return result
