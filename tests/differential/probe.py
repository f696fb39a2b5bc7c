"""Probes: small programs of torch's public RPC API whose outcome is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["PROBES", "Probe", "probe", "probes_of"]


class Probe(NamedTuple):
    """One probe.

    Args:
        name: ``file.function``, with ``[case]`` for one of several cases.
        run: returns or raises the outcome.
        words: what programs look for in its error's text, in lower case.
        alone: it runs in a process of its own, which has not called ``init_rpc``.
    """

    name: str
    run: Callable[[], Any]
    words: tuple[str, ...]
    alone: bool


PROBES: dict[str, Probe] = {}


def probe(
    *words: str, cases: dict[str, Any] | None = None, alone: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a probe, or one for each of ``cases``, whose value it gets."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        lower = tuple(word.lower() for word in words)
        if cases is None:
            PROBES[name] = Probe(name, function, lower, alone)
        for case, value in (cases or {}).items():
            run = _with(function, value)
            PROBES[f"{name}[{case}]"] = Probe(f"{name}[{case}]", run, lower, alone)
        return function

    return register


def _with(function: Callable[..., Any], value: Any) -> Callable[[], Any]:
    return lambda: function(value)


def probes_of(pattern: str) -> list[Probe]:
    """Return the probes whose name contains ``pattern``."""
    return [each for name, each in PROBES.items() if pattern in name]
