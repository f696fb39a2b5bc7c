"""How long workers live, and what they do whenever they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayrpc.errors import ConfigError

__all__ = ["Lifetime"]


@dataclass(frozen=True)
class Lifetime:
    """How long workers live, as ``rayrpc.start_workers`` is told.

    Args:
        detached (bool): they outlive the process that starts them, and Ray has what they print.
        max_restarts (int): how often each is started again if it dies; -1: always.
        on_start (Callable, optional): runs on each, before it is called.

    Raises:
        ConfigError: ``max_restarts`` is no such number, or detached workers would have it.
        TypeError: ``on_start`` is no function.
    """

    detached: bool = False
    max_restarts: int = 0
    on_start: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        limit = self.max_restarts
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < -1:
            raise ConfigError(
                f"max_restarts must be a number from 0, or -1 for no limit, got {limit!r}"
            )
        if self.on_start is not None and not callable(self.on_start):
            raise TypeError(f"on_start must be a function, got {self.on_start!r}")
        if self.detached and limit:
            raise ConfigError(
                "detached workers cannot be started again by the program that has started them: "
                "leave out max_restarts, or detached"
            )
