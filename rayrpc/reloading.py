"""Edited modules on the workers: ``rpc.reload``."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rayrpc._concurrency.outcome import attempt
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import ArgumentTypeError, ConfigError

__all__ = ["Source", "load_again", "reload", "reload_on_workers"]


class Source(NamedTuple):
    """The file of a module.

    Args:
        module (str): its name.
        path (str): of the file, where the program runs.
        text (bytes): what is in it.
    """

    module: str
    path: str
    text: bytes


def reload(*modules: ModuleType) -> None:
    """Load edited modules again, here and on the workers of the default group.

    As with ``importlib.reload``, a module keeps its dict, and what has its former functions and
    classes keeps these. The workers get the modules as they are here, also those on hosts without
    the files; a worker that has not imported a module, and has the file, imports it when it needs
    it.

    Args:
        *modules (module): in the order in which they are loaded; of files with Python code.

    Raises:
        TypeError: one is no module.
        ConfigError: one has no file with Python code, or is the program itself.
        RuntimeError: RPC is not initialized.
        Exception: what loading a module raised, here or on a worker.

    Example:
        >>> import trainer                     # doctest: +SKIP
        >>> rpc.reload(trainer)                # doctest: +SKIP

    Source: rayrpc's own; ``importlib.reload``.
    """
    agent = current.initialized_agent()
    for module in modules:
        _check(module)
    for module in modules:
        importlib.reload(module)
    reload_on_workers(agent, modules)


def reload_on_workers(agent: Agent, modules: Iterable[ModuleType]) -> None:
    """Load modules again on the workers of a group, all at once.

    Args:
        agent (Agent): of this process in the group.
        modules: as they are here.

    Raises:
        Exception: what loading one raised on a worker.
    """
    sources = [_source_of(module) for module in modules]
    mine = agent.member.token
    workers = [each for each in agent.members.all() if each.token != mine and not each.is_guest]
    call, timeout = Invocation(load_again, (sources,)), agent.default_timeout
    futures = [agent.caller.future(worker, call, timeout) for worker in workers]
    for outcome in [attempt(future.wait) for future in futures]:  # after all have ended
        outcome.unwrap()


def _check(module: object) -> None:
    if not isinstance(module, ModuleType):
        raise ArgumentTypeError(f"reload takes modules, got {module!r}")
    path = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or path is None or not path.endswith(".py"):
        raise ConfigError(
            f"module {module.__name__!r} cannot be loaded again: it has no file with Python code, "
            "or is the program itself, whose functions go by value from a notebook"
        )


def _source_of(module: ModuleType) -> Source:
    path = str(module.__file__)
    return Source(module.__name__, path, Path(path).read_bytes())


def load_again(sources: Iterable[Source]) -> None:
    """Load modules of a program again, on a worker.

    Args:
        sources: of the modules, which the worker has imported, or not.
    """
    for source in sources:
        module = sys.modules.get(source.module)
        if module is None:
            path = _path_of(source.module)
            if path is None or Path(path).read_bytes() == source.text:
                continue
            module = importlib.import_module(source.module)
        path = module.__file__ or source.path
        linecache.cache.pop(path, None)  # tracebacks show its lines
        exec(compile(source.text, path, "exec", dont_inherit=True), module.__dict__)


def _path_of(module: str) -> str | None:
    """Return the path of a module's file; None if there is no such module."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that is not there
        return None
    return found.origin if found is not None and found.has_location else None
