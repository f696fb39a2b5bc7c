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
        more (tuple): further pairs of such texts.
    """

    name: str
    module: str
    old: str
    new: str
    more: tuple[tuple[str, str], ...] = ()


@contextlib.contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Have the functions of a module run the changed code; no object is made anew."""
    module = importlib.import_module(f"rayrpc.{mutation.module}")
    source = inspect.getsource(module)
    mutant = source
    for old, new in ((mutation.old, mutation.new), *mutation.more):
        assert mutant.count(old) == 1, f"{mutation.name}: the text is there not once"
        left = old.count("\n") - new.count("\n")
        assert left >= 0, "too many lines"
        mutant = mutant.replace(old, new + "\n" * left)  # lines stay: failures name them
    changed = dict(_codes(compile(mutant, str(module.__file__), "exec")))
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
