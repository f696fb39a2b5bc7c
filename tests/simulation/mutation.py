"""Put small faults into the code that is simulated."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import NamedTuple

from simulation.replacing import functions_of

__all__ = ["Mutation", "mutated"]


class Mutation(NamedTuple):
    """A fault.

    Args:
        name (str): what is wrong then.
        module (str): where, in ``rayrpc``.
        old (str): the text that is replaced; it occurs once.
        new (str): the text instead.
    """

    name: str
    module: str
    old: str
    new: str


@contextlib.contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Have the functions of a module run the changed code; no object is made anew."""
    module = importlib.import_module(f"rayrpc.{mutation.module}")
    source = inspect.getsource(module)
    assert source.count(mutation.old) == 1, f"{mutation.name}: the text is there not once"
    assert mutation.new.count("\n") <= mutation.old.count("\n"), "too many lines"
    # lines stay where they are: failures name them
    new = mutation.new + "\n" * (mutation.old.count("\n") - mutation.new.count("\n"))
    changed = dict(_codes(compile(source.replace(mutation.old, new), str(module.__file__), "exec")))
    before = [
        (function, function.__code__)
        for function in functions_of(module)
        if changed[function.__qualname__] != function.__code__
    ]
    assert before, f"{mutation.name}: nothing has changed"
    try:
        for function, _ in before:
            function.__code__ = changed[function.__qualname__]
        yield
    finally:
        for function, original in before:
            function.__code__ = original


def _codes(code: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Yield the functions in a module's code, and in its classes, by their qualified names."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield prefix + each.co_name, each
            yield from _codes(each, f"{prefix}{each.co_name}.")
