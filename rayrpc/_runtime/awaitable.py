"""Values that are computed when they are first used.

    aw = rayrpc.jit.awaitable(slow, 3)     # nothing runs
    total = aw + 1                         # slow(3) runs here, once

An ``Await[W]`` acts as a ``W`` wherever one is asked for: attributes, operators, indexing,
iteration, functions of torch.  In TorchScript, torch's own ``torch.jit._awaitable`` does this.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from rayrpc._concurrency.outcome import Error, Outcome, Value, without_frames
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import wait_for_lock

__all__ = [
    "Await",
    "awaitable",
    "awaitable_nowait",
    "awaitable_wait",
]

W = TypeVar("W")

_jit: Any = torch.jit


class Await(Generic[W]):
    """A value of type ``W`` that is computed once, by the thread that first asks for it.

    The value, or the error, is kept.  It pickles as its value.  Subclasses may override
    ``_wait_impl`` instead of giving a function; attributes that they set on themselves begin with
    an underscore, others are the value's.

    Args:
        func (Callable): computes it.
        args, kwargs: for ``func``.

    Source: ``torch.jit._awaitable``; ``LazyAwaitable`` of TorchRec.
    """

    def __init__(self, func: Callable[..., W] | None = None, *args: Any, **kwargs: Any) -> None:
        _set(self, "_await_call", (func, args, kwargs))
        _set(self, "_await_callbacks", [])
        _set(self, "_await_outcome", None)
        _set(self, "_await_lock", threading.RLock())
        _set(self, "_await_since", None)  # by the clock, while it is computed
        _set(self, "_await_name", "")  # of the function, afterwards

    def wait(self) -> W:
        """Return the value; compute it, if nobody has yet.

        Raises:
            Exception: computing it raised this.
            RuntimeError: computing it asks for itself.
        """
        outcome: Outcome[W] | None = self._await_outcome
        if outcome is None:
            lock = self._await_lock
            if not lock.acquire(blocking=False):  # another thread computes it
                release_reader()
                wait_for_lock(lock)
            try:
                outcome = self._await_outcome or self._await_compute()
            finally:
                lock.release()
        return outcome.unwrap()

    def _wait_impl(self) -> W:
        """Compute the value."""
        func, args, kwargs = self._await_call
        if func is None:
            raise NotImplementedError(f"{type(self).__name__} has no function and no _wait_impl()")
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def _await_compute(self) -> Outcome[W]:
        if self._await_since is not None:
            raise RuntimeError(f"computing the value of {self!r} asks for that value itself")
        _set(self, "_await_since", time.monotonic())
        outcome: Outcome[W]
        try:
            value = self._wait_impl()
            for callback in self._await_callbacks:
                value = callback(value)
            outcome = Value(value)
        except Exception as exc:
            outcome = Error(without_frames(exc))
        finally:
            _set(self, "_await_since", None)
        _set(self, "_await_outcome", outcome)
        _set(self, "_await_name", Await._await_source(self))  # a subclass may have its own
        _set(self, "_await_call", (None, (), {}))  # what they hold may be needed no longer
        return outcome

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that the value goes through, in turn, when it has been computed."""
        found: list[Callable[[W], W]] = self._await_callbacks
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Await, awaitable_wait, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_await_"):  # of one that is being made
            raise AttributeError(name)
        return getattr(self.wait(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wait(), name, value) if name[0] != "_" else _set(self, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wait(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = self.wait()
        return value(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.wait(),)

    def __repr__(self) -> str:
        outcome, since = self._await_outcome, self._await_since
        if isinstance(outcome, Value):
            return f"{type(self).__name__}({outcome.value!r})"
        if outcome is not None:
            state = f"failed with {outcome.error!r}"
        elif since is not None:
            state = f"being computed for {time.monotonic() - since:.1f} s"
        else:
            state = "not computed"
        source = self._await_source()
        return f"<{type(self).__name__}{source and f' of {source}'}: {state}>"

    def _await_source(self) -> str:
        """Return what computes the value, for ``repr``; empty: the subclass does."""
        func = self._await_call[0]
        if func is None:
            name: str = self._await_name
            return name
        return getattr(func, "__name__", type(func).__name__)

    if TYPE_CHECKING:  # the operators, for type checkers; ``_forward`` adds them
        __add__: Any
        __sub__: Any
        __mul__: Any
        __matmul__: Any
        __truediv__: Any
        __floordiv__: Any
        __mod__: Any
        __divmod__: Any
        __pow__: Any
        __lshift__: Any
        __rshift__: Any
        __and__: Any
        __or__: Any
        __xor__: Any
        __radd__: Any
        __rsub__: Any
        __rmul__: Any
        __rmatmul__: Any
        __rtruediv__: Any
        __rfloordiv__: Any
        __rmod__: Any
        __rdivmod__: Any
        __rpow__: Any
        __rlshift__: Any
        __rrshift__: Any
        __rand__: Any
        __ror__: Any
        __rxor__: Any
        __lt__: Any
        __le__: Any
        __eq__: Any
        __ne__: Any
        __gt__: Any
        __ge__: Any
        __hash__: Any
        __getitem__: Any
        __setitem__: Any
        __delitem__: Any
        __contains__: Any
        __len__: Any
        __iter__: Any
        __next__: Any
        __reversed__: Any
        __neg__: Any
        __pos__: Any
        __invert__: Any
        __abs__: Any
        __round__: Any
        __index__: Any
        __bool__: Any
        __int__: Any
        __float__: Any
        __complex__: Any
        __bytes__: Any
        __enter__: Any
        __exit__: Any
        __array__: Any


_set = object.__setattr__


def _itself(value: Any) -> Any:
    return value


def _forward(name: str, func: Callable[..., Any]) -> None:
    """Have an operator of ``Await`` do what it does with the value."""

    def method(self: Any, *args: Any) -> Any:
        return func(self.wait(), *map(_plain, args))

    method.__name__ = method.__qualname__ = name
    setattr(Await, name, method)


def _plain(value: Any) -> Any:
    return value.wait() if isinstance(value, Await) else value


for _name in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
):
    _func = getattr(operator, f"__{_name}__")
    _forward(f"__{_name}__", _func)
    _forward(f"__r{_name}__", lambda value, other, func=_func: func(other, value))
for _func in (divmod, round):
    _forward(f"__{_func.__name__}__", _func)
_forward("__rdivmod__", lambda value, other: divmod(other, value))
for _name in ("lt", "le", "eq", "ne", "gt", "ge", "getitem", "setitem", "delitem", "contains"):
    _forward(f"__{_name}__", getattr(operator, f"__{_name}__"))
for _name in ("neg", "pos", "invert", "index", "abs"):
    _forward(f"__{_name}__", getattr(operator, f"__{_name}__"))
for _func in (bool, int, float, complex, len, iter, next, reversed, hash, str, format, dir):
    _forward(f"__{_func.__name__}__", _func)
_forward("__bytes__", bytes)
_forward("__enter__", lambda value: type(value).__enter__(value))
_forward("__exit__", lambda value, *args: type(value).__exit__(value, *args))
_forward("__array__", lambda value, *args: value.__array__(*args))


def awaitable(func: Callable[..., W], *args: Any, **kwargs: Any) -> Await[W]:
    """Return an ``Await`` of ``func(*args, **kwargs)``, which does not run yet.

    Args:
        func (Callable): computes the value, when that is asked for.
        args, kwargs: for it.

    Source: ``torch.jit._awaitable``.
    """
    return Await(func, *args, **kwargs)


def awaitable_wait(aw: Any) -> Any:
    """Return the value of an ``Await``, computed here if that was not done yet.

    Args:
        aw (Await): of rayrpc, or of torch.

    Raises:
        Exception: computing it raised this, now or before.

    Source: ``torch.jit._awaitable_wait``.
    """
    return aw.wait() if isinstance(aw, Await) else _jit._awaitable_wait(aw)


def awaitable_nowait(o: W) -> Await[W]:
    """Return an ``Await`` that has its value already.

    Args:
        o: the value, of any type.

    Source: ``torch.jit._awaitable_nowait``.
    """
    made: Await[W] = Await()
    _set(made, "_await_outcome", Value(o))
    return made
