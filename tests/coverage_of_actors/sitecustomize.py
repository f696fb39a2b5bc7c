"""Measure the coverage of subprocesses in less time, and that of Ray's workers at all.

Python imports this at its start where the folder is on PYTHONPATH (``conftest.py`` sees to it when
coverage is measured). Coverage itself was started just before, by its own ``.pth`` file. Large
packages are imported without tracing, which would take longer than the import. Ray's workers end
by a signal that no handler sees, and run calls in threads that Ray started in C++: these are
traced here, and from the first call on the data is saved every second and at the end of each call,
by one thread: with two of them some workers crashed. Ray's other processes run no code of rayrpc
and are not traced. Workers are not forked here: Ray starts them.
"""

import contextlib
import functools
import importlib.machinery
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from coverage_locks import renew_locks

SAVE_SECONDS = 1.0
UNTRACED = ("torch", "ray")


class _Untraced(importlib.machinery.PathFinder):
    """Import some packages without tracing."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in UNTRACED:
            return None
        spec: Any = super().find_spec(fullname, path, target)
        if spec is not None:
            spec.loader.exec_module = functools.partial(cls._execute, spec.loader.exec_module)
        return spec

    @staticmethod
    def _execute(execute: Callable[[Any], None], module: Any) -> None:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            execute(module)
        finally:
            sys.settrace(trace)


class _Saver:
    """Save what is covered: every second, and when asked."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self._waiting: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="coverage", daemon=True)
        self._starting = threading.Lock()

    def start(self) -> None:
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def save(self) -> None:
        """Save, and wait for it for a while."""
        saved = threading.Event()
        self._waiting.put(saved)
        saved.wait(SAVE_SECONDS)

    def _run(self) -> None:
        sys.settrace(None)
        while True:
            waiting: list[threading.Event] = []
            with contextlib.suppress(queue.Empty):
                waiting.append(self._waiting.get(timeout=SAVE_SECONDS))
            with contextlib.suppress(Exception):  # the process is ending
                self._coverage.save()
            for each in waiting:
                each.set()


def _trace_threads_of_ray(coverage: Any) -> None:
    """Trace each thread that runs an actor's method from there on, and save what it has covered."""
    from ray._private import function_manager

    manager: Any = function_manager.FunctionActorManager
    make = manager._make_actor_method_executor
    # it walks through all source files, for those that did not run: the main process does so
    coverage._post_save_work = lambda: None
    saver = _Saver(coverage)

    def make_traced(self: Any, method_name: str, method: Any) -> Callable[..., Any]:
        execute: Any = make(self, method_name, method)
        saver.start()
        if threading.gettrace() is None:
            return execute

        def traced(*args: Any, **kwargs: Any) -> Any:
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            try:
                return execute(*args, **kwargs)
            finally:
                saver.save()

        vars(traced).update(vars(execute))  # what Ray notes about it
        return traced

    manager._make_actor_method_executor = make_traced


def _start() -> None:
    coverage = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is not None:
        sys.meta_path.insert(0, _Untraced)
        renew_locks()
    scripts = [argument for argument in sys.orig_argv if argument.endswith(".py")]
    if current is not None and scripts and scripts[0].endswith("start_worker.py"):
        os.environ.pop("RAYRPC_INTERNAL_FORK_SERVER", None)  # forked, it would not be measured
    if current is None or not scripts or "-packages/ray/" not in scripts[0]:
        return
    if scripts[0].endswith("default_worker.py"):
        _trace_threads_of_ray(current)
    else:
        current.stop()


_start()
