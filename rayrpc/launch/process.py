"""A script's own processes: the shim is in place in them too, before they load the script.

``multiprocessing`` sends a spawned child a dictionary before anything else; an entry of ours in
it is unpickled there first, and that installs the shim.  Forked children have it already.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from typing import Any

import torch.multiprocessing

from rayrpc import compat, config

__all__ = ["enter"]

_spawn_module: Any = multiprocessing.spawn
_get_preparation_data = _spawn_module.get_preparation_data


class _Shim:
    """Unpickles to nothing, after ``enter``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return enter, (self._settings,)


def _preparation_data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = _get_preparation_data(name)
    data["rayrpc"] = _Shim(config.settings().to_dict())
    return data


def enter(settings: dict[str, Any]) -> None:
    """Put rayrpc in place for a script: RPC, spawned ranks, and processes that it starts.

    Args:
        settings (dict): as ``Settings.to_dict`` returns them.
    """
    from rayrpc.launch import spawning

    config.use(config.Settings.from_dict(settings))
    compat.install()
    _spawn_module.get_preparation_data = _preparation_data
    mp: Any = torch.multiprocessing
    mp.spawn = mp.start_processes = spawning.start_processes
    module: Any = sys.modules["torch.multiprocessing.spawn"]  # "spawn" in mp is the function
    module.spawn = module.start_processes = spawning.start_processes
