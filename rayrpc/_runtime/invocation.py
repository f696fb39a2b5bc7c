"""What a call runs, and where; the types of the arguments of ``rpc_sync`` and its like."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.futures import Future

from rayrpc._protocol.ids import WorkerInfo

__all__ = [
    "Args",
    "AsyncFunction",
    "Function",
    "Invocation",
    "Kwargs",
    "NOTHING",
    "To",
    "asked_ahead",
    "forwards",
    "is_asked_ahead",
    "is_prompt",
    "plain_name",
    "prompt",
    "user_function",
]

# Its functions call methods of RRefs' values.
PROXY_MODULE = "rayrpc._runtime.rrefs.proxy"

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: a worker: by name, by WorkerInfo or by rank
To = str | WorkerInfo | int
Function = Callable[..., T]
#: the result of the call is that of the Future, or of the coroutine
AsyncFunction = Callable[..., Future[T] | Coroutine[Any, Any, T]]
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None


class Invocation(NamedTuple):
    """A function and its arguments.

    Args:
        func (Callable): runs at the callee.
        args (Sequence): its positional arguments.
        kwargs (Mapping): its keyword arguments.
    """

    func: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def __call__(self) -> Any:
        """Run it here."""
        return self.func(*self.args, **self.kwargs)

    def map(self, change: Callable[[Any], Any]) -> Invocation:
        """Return a copy with changed arguments, those that ``func`` forwards included."""
        func, args, kwargs = self
        if hasattr(func, "_rayrpc_forwards"):
            *own, args, kwargs = args
            return Invocation(func, (*own, *_changed(args, kwargs, change)))
        return Invocation(func, *_changed(args, kwargs, change))


def _changed(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(change, args)), {name: change(each) for name, each in kwargs.items()}


def prompt(func: F) -> F:
    """Have calls of a function of this package run at once, without a worker slot.

    Args:
        func: the function; it must not wait, unless no other call is served yet.
    """
    func._rayrpc_is_prompt = True  # type: ignore[attr-defined]
    return func


def is_prompt(func: object) -> bool:
    """Tell whether calls of a function run at once."""
    return getattr(func, "_rayrpc_is_prompt", None) is True


def asked_ahead(func: F) -> F:
    """Mark a function of this package whose calls wait for earlier ones: they are not slow calls.

    Args:
        func: the function, whose calls are replied to in order.
    """
    func._rayrpc_is_asked_ahead = True  # type: ignore[attr-defined]
    return func


def is_asked_ahead(func: object) -> bool:
    """Return whether calls of a function wait for earlier ones."""
    return getattr(func, "_rayrpc_is_asked_ahead", None) is True


def forwards(func: F) -> F:
    """Mark a function of this package that calls another one with its last two arguments.

    Args:
        func: the function; the two are positional and keyword arguments of the other one.
    """
    func._rayrpc_forwards = True  # type: ignore[attr-defined]
    return func


#: what a fetch runs
NOTHING = Invocation(lambda: None)


def user_function(func: object) -> str:
    """Return the name of a user's function, for messages; empty if it is one of rayrpc itself.

    Args:
        func: what a call runs; a text: the name of a method of an RRef's value.
    """
    if isinstance(func, str):
        return func
    module = getattr(func, "__module__", None) or ""
    if module == PROXY_MODULE:
        return "a method of an RRef's value"
    return "" if module.startswith("rayrpc._") else plain_name(func)


def plain_name(func: object) -> str:
    """Return the name of a callable as users write it, without its module."""
    name: str = getattr(func, "__qualname__", None) or type(func).__qualname__
    return name.removeprefix("_VariableFunctionsClass.")  # of torch.add and its like
