"""RRef: the handle of a value that lives on some worker."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import torch
from torch.futures import Future

from rayrpc._concurrency.outcome import Error, Value, complete
from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._protocol.messages import Fork
from rayrpc._runtime.invocation import prompt
from rayrpc._runtime.objects import ref_of
from rayrpc._runtime.rrefs import gradients
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.rrefs.creation_site import users_line
from rayrpc._runtime.rrefs.handle_protocol import Forks
from rayrpc._runtime.rrefs.home import Home, get_home
from rayrpc._runtime.rrefs.lazy import LazyRemote
from rayrpc._runtime.rrefs.proxy import RRefProxy
from rayrpc._runtime.rrefs.unusable import deleted, foreign, raise_creation_timeout
from rayrpc._runtime.rrefs.value_type import _rref_typeof_on_owner, completed
from rayrpc._runtime.serialization.reducers import add_reducer
from rayrpc._runtime.serialization.sessions import reduce_rref
from rayrpc._runtime.user_api import UserApi
from rayrpc.options import UNSET_RPC_TIMEOUT, to_seconds

__all__ = ["PyRRef", "RRef", "make_handle"]

T = TypeVar("T")


class RRef(Generic[T]):
    """Reference a value on this worker, so that it can be shared with others.

    References to values on other workers come from ``remote`` and from calls.

    Args:
        value (object): the value.
        type_hint (type, optional): of the value, if that is a ScriptModule.

    Raises:
        RuntimeError: RPC is not initialized, or a type is missing, or given for another value.

    Source: ``torch.distributed.rpc.RRef``.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_cell",
        "_creation",
        "_fork_id",
        "_future",
        "_home",
        "_owner",
        "_profiling",
        "_rref_id",
        "_type",
    )

    _home: Home
    _cell: Cell | None
    _creation: Cell | None
    _fork_id: GloballyUniqueId | None
    _future: Future[Any] | None
    _owner: WorkerInfo
    _rref_id: GloballyUniqueId

    def __init__(self, value: T, type_hint: Any = None) -> None:
        home = get_home()
        if isinstance(value, torch.jit.ScriptModule) is (type_hint is None):
            raise RuntimeError(  # torch's texts
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface "
                "type hint."
                if type_hint is None
                else "type_hint should only be specified when the RRef being created contains a "
                "ScriptModule."
            )
        cell = Cell(Value(value), users_line())
        self._fill(home, home.rrefs.new_id(), None, home.info, cell)

    @classmethod
    def _of(cls, home: Home, value: Any) -> RRef[Any]:
        """Return an RRef to a value of a worker of this process."""
        made = cls.__new__(cls)
        made._fill(home, home.rrefs.new_id(), None, home.info, Cell(Value(value), users_line()))
        return made

    def _fill(
        self,
        home: Home,
        rref_id: GloballyUniqueId,
        fork_id: GloballyUniqueId | None,
        owner: WorkerInfo,
        cell: Cell | None,
    ) -> None:
        self._home = home
        self._rref_id = rref_id
        self._fork_id = fork_id
        self._owner = owner
        self._cell = cell
        self._creation = None
        self._future = None
        self._profiling = None
        self._type: Any = None
        if fork_id is not None:
            home.rrefs.watch(self, fork_id)

    # -- owner --------------------------------------------------------------------------------

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
        return self._fork_id is None or self._home.rrefs.is_confirmed(self._fork_id)

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
        __tracebackhide__ = True
        if self._cell is not None:
            to_seconds(timeout)
            return self.local_value()
        self._check("to_here() on it")
        self._raise_creation_error()
        owner = self._home.members.lookup(self._owner)
        self._check("to_here() on it")  # the owner may have died, and another have its name
        seconds = self._home.resolve_timeout(timeout)
        return cast(T, self._home.caller.fetch(owner, self._rref_id, self, seconds))

    def local_value(self) -> T:
        """Return the value itself; only on its owner.

        Raises:
            RuntimeError: this worker is not the owner.
        """
        if self._cell is None:
            raise RuntimeError(
                f"For UserRRef(rref_id={self._rref_id}, fork_id={self._fork_id}), can't call "
                f"localValue() on user {self._home.info}. Call it on owner {self._owner}"
            )
        return cast(T, self._cell.wait().unwrap())

    def object_ref(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a Ray ObjectRef of the value as it is now, or of what it will be.

        The owner puts a copy of the value into Ray's object store, where any task or actor of the
        cluster finds it; what reads it needs rayrpc.  An error of the creating call is raised by
        ``ray.get``.  The object lives as long as its ObjectRefs, and as the owner's process.

        Args:
            timeout (float): of the call of the owner, in seconds; it waits for no value. 0: none;
                not given: the default.

        Returns:
            ``ray.ObjectRef``.

        Raises:
            WorkerDiedError: the owner is gone.

        Example:
            >>> rref = rpc.remote("worker1", torch.ones, args=(2,))
            >>> ray.get(rref.object_ref())
            tensor([1., 1.])

        Source: rayrpc's own; ``ray.ObjectRef``.
        """
        if self._cell is not None:
            return ref_of(self._home.objects, self._cell)
        self._check("object_ref() on it")
        self._raise_creation_error()
        return self._home.user_api.rpc_sync(
            self._owner, _object_ref_on_owner, args=(self,), timeout=timeout
        )

    def _raise_creation_error(self) -> None:
        if self._creation is not None:
            raise_creation_timeout(self._creation.value)

    def _check(self, action: str) -> None:
        if self._fork_id is not None and not self._home.rrefs.is_held(self._fork_id):
            raise deleted(self._home, self._owner, (self._rref_id, self._fork_id), action)

    # -- calls on the value -------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy[Any]:
        """Return a proxy whose methods run on the value, at its owner, and return the result.

        Args:
            timeout (float): of each call in seconds; 0: none; not given: the default.

        Source: ``torch.distributed.rpc.RRef.rpc_sync``.
        """
        return RRefProxy(self, self._home.user_api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy[Future[Any]]:
        """Return a proxy whose methods run on the value, at its owner, and return Futures.

        Args:
            timeout (float): of each call in seconds; 0: none; not given: the default.

        Source: ``torch.distributed.rpc.RRef.rpc_async``.
        """
        return RRefProxy(self, self._home.user_api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy[RRef[Any]]:
        """Return a proxy whose methods run on the value, at its owner, and return RRefs.

        Args:
            timeout (float): of each call in seconds; 0: none; not given: the default.

        Source: ``torch.distributed.rpc.RRef.remote``.
        """
        return RRefProxy(self, self._home.user_api.remote, timeout)

    def lazy(self, timeout: float = UNSET_RPC_TIMEOUT) -> LazyRemote[T]:
        """Return an ``Await`` of the value, which is fetched when it is first used.

        Args:
            timeout (float): of the fetch, in seconds; 0: none; not given: the default.

        Returns:
            ``LazyRemote``: it is sent to other workers as a reference.
        """
        return LazyRemote(self, timeout)

    def _get_api(self) -> UserApi:
        return self._home.user_api

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a Future of it; it is requested once."""
        future = self._type
        if future is not None and future.done():
            try:
                kind = future.value()
            except Exception:
                future = None  # such as a time-out: request it again
            else:
                return kind if blocking else future
        if future is None:
            if self._cell is not None:
                future = completed(_rref_typeof_on_owner(self))
            else:
                self._check("_get_type() on it")
                self._raise_creation_error()
                future = self._home.user_api.rpc_async(
                    self._owner, _rref_typeof_on_owner, args=(self,), timeout=timeout
                )
            self._type = future
        if not blocking:
            return future
        if not future.done():
            release_reader()
        return future.wait()

    def _begin_creation(self) -> Cell:
        """Return the cell that takes the outcome of the call that creates the value."""
        self._creation = Cell()
        return self._creation

    def _get_future(self) -> Future[Any]:
        """Return a Future that completes when the owner has created the value (torch's name)."""
        if self._future is None:
            future: Future[Any] = Future()
            self._future = future
            if self._creation is None:
                future.set_result(None)
            else:
                run = self._home.caller.run_callback
                self._creation.on_done(lambda outcome: run(lambda: complete(future, outcome)))
        return self._future

    def _set_future(self, future: Future[Any]) -> None:
        """Replace the Future of the creation by one that a hook made of it."""
        self._future = future

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling = future

    def _get_profiling_future(self) -> Any:
        return self._get_future() if self._profiling is None else self._profiling

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar tensor, at its owner.

        Args:
            dist_autograd_ctx_id (int): a context of distributed autograd; not given: a local pass,
                which only the owner may run.
            retain_graph (bool): keep the graph for another pass.

        Raises:
            RuntimeError: the value is no tensor, or the pass failed.
        """
        gradients.run_backward(self, dist_autograd_ctx_id, retain_graph)

    # -- pickling -----------------------------------------------------------------------------

    def _share(self, rrefs: Forks, to: int | None, into: list[Fork] | None = None) -> Fork:
        """Fork this RRef for a worker; see ``RRefContext.share``."""
        if rrefs is not self._home.rrefs:
            raise foreign(self, self._home, rrefs.group)
        if self._cell is not None:
            return rrefs.share_owned(self._rref_id, self._cell, to, into)
        assert self._fork_id is not None
        self._check("fork an UserRRef")
        self._raise_creation_error()
        try:
            return rrefs.share_used(self._fork_id, to, into)
        except KeyError:  # its owner was lost just now
            self._check("fork an UserRRef")
            raise

    def _lend(self, rrefs: Forks, to: int | None) -> GloballyUniqueId | None:
        """Lend this RRef to its owner; see ``RRefContext.lend``."""
        if rrefs is not self._home.rrefs:
            raise foreign(self, self._home, rrefs.group)
        if self._fork_id is None or not rrefs.is_counted(self._fork_id, to):
            return None
        failed = self._creation is not None and isinstance(self._creation.value, Error)
        return None if failed else self._rref_id

    def _serialize(self) -> tuple[Any, ...]:
        """Return a fork as a tuple, for picklers of libraries."""
        return tuple(self._share(self._home.rrefs, None))

    @staticmethod
    def _deserialize(fork: tuple[Any, ...]) -> RRef[Any]:
        """Return the RRef that a tuple of ``_serialize`` is a fork of."""
        rref_id, fork_id, owner, parent = fork
        received = Fork(GloballyUniqueId(*rref_id), GloballyUniqueId(*fork_id), owner, parent)
        return cast(RRef[Any], get_home().rrefs.receive(received))

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


def make_handle(
    home: Home,
    rref_id: GloballyUniqueId,
    fork_id: GloballyUniqueId | None,
    owner: int,
    cell: Cell | None,
) -> RRef[Any]:
    """Return a handle of a worker; see ``MakeHandle``."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._fill(home, rref_id, fork_id, home.members.info_of(owner), cell)
    return rref


@prompt
def _object_ref_on_owner(rref: RRef[Any]) -> Any:
    return rref.object_ref()
