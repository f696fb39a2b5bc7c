"""What a call runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Invocation"]


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
