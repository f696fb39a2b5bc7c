"""Modules that IPython's ``%autoreload`` loads again are loaded again on the workers, too.

IPython calls functions before and after each cell, in the order in which they were registered.
``%autoreload`` loads modules before a cell, and after one notes those that it has imported.
"""

from __future__ import annotations

import sys
from typing import Any

from rayrpc._runtime import current
from rayrpc.launch.notebook import ipython_shell
from rayrpc.reloading import reload_on_workers

__all__ = ["follow_autoreload"]


def follow_autoreload() -> None:
    """Have the default group's workers follow ``%autoreload``, if this is IPython; idempotent."""
    shell = ipython_shell()
    if shell is not None and not hasattr(shell, _FOLLOWER):
        setattr(shell, _FOLLOWER, Follower(shell))


_FOLLOWER = "_rayrpc_follower"


class Follower:
    """Look, between the cells of a notebook, which modules were loaded again.

    Args:
        shell (InteractiveShell): of IPython.
    """

    def __init__(self, shell: Any) -> None:
        self._events = shell.events
        self._seen = self._modules()
        self._events.register("pre_run_cell", self.before_cell)
        self._events.register("post_run_cell", self.after_cell)

    def _modules(self) -> dict[str, float]:
        """Return the modules that ``%autoreload`` has loaded, by name: when they were changed."""
        for callback in self._events.callbacks["pre_run_cell"]:
            reloader = getattr(getattr(callback, "__self__", None), "_reloader", None)
            if reloader is not None:
                return {
                    name: time
                    for name, time in reloader.modules_mtimes.items()
                    if reloader.failed.get(_path_of(name)) != time
                }
        return {}

    def before_cell(self, _: object) -> None:
        """Send the modules that were loaded again since the last cell."""
        now = self._modules()
        changed = [name for name, time in now.items() if self._seen.get(name, time) != time]
        self._seen.update(now)
        modules = [sys.modules[name] for name in changed if name in sys.modules]
        if modules and current.is_set():
            reload_on_workers(current.get_agent(), modules)

    def after_cell(self, _: object) -> None:
        """Note the modules that were imported; stay behind ``%autoreload``."""
        self._seen = self._modules() | self._seen
        self._events.unregister("pre_run_cell", self.before_cell)
        self._events.register("pre_run_cell", self.before_cell)


def _path_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)
