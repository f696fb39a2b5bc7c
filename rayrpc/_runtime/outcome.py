"""How something ended: a value or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

__all__ = ["Error", "Outcome", "Value"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value(Generic[T]):
    """It ended well."""

    value: T

    def unwrap(self) -> T:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Error:
    """It ended with an exception."""

    error: BaseException

    def unwrap(self) -> NoReturn:
        """Raise the error."""
        raise self.error


Outcome = Value[T] | Error
