"""Save the coverage of Ray's workers, which end by a signal that no handler sees.

Python imports this at its start where the folder is on PYTHONPATH (``conftest.py`` sees to it when
coverage is measured). Coverage itself was started just before, by its own ``.pth`` file. In a
worker of Ray two things are missing, and added here: the data is saved every second, and threads
that Ray started in C++ are traced.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SAVE_SECONDS = 1.0


def _save(coverage: Any) -> None:
    while True:
        time.sleep(SAVE_SECONDS)
        with contextlib.suppress(Exception):  # the process is ending
            coverage.save()


def _trace_threads_of_ray() -> None:
    """Let each thread that runs an actor's method be traced from there on."""
    from ray._private import function_manager

    manager: Any = function_manager.FunctionActorManager
    make = manager._make_actor_method_executor

    def make_traced(self: Any, method_name: str, method: Any) -> Callable[..., Any]:
        execute: Any = make(self, method_name, method)
        if threading.gettrace() is None:
            return execute

        def traced(*args: Any, **kwargs: Any) -> Any:
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            return execute(*args, **kwargs)

        vars(traced).update(vars(execute))  # what Ray notes about it
        return traced

    manager._make_actor_method_executor = make_traced


def _start() -> None:
    if not any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
        return
    coverage = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is None:
        return
    threading.Thread(target=_save, args=(current,), name="coverage", daemon=True).start()
    _trace_threads_of_ray()


_start()
