"""Put rayrpc in place for a script, and for the processes that the script starts.

``multiprocessing`` sends a spawned child a dictionary, which the child unpickles before it loads
the script.  An entry of ours in that dictionary enters the shim there.  Forked children inherit it.
Other Python processes (``subprocess``, torchrun) find it by two environment variables: PYTHONPATH
has the folder of ``launch.children``, and another one holds the shim.
"""

from __future__ import annotations

import base64
import dataclasses
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.multiprocessing

from rayrpc import config
from rayrpc._transports import process_origin
from rayrpc.launch.children import with_folder

__all__ = ["Shim", "enter_in_child", "get_install", "set_install"]

# Ray's processes and other machines do not get it: see ``launch.program``.
_SHIM = "RAYRPC_INTERNAL_SHIM"

_spawn_module: Any = multiprocessing.spawn
_get_preparation_data = _spawn_module.get_preparation_data

_install: Callable[[], None] | None = None


def set_install(install: Callable[[], None] | None) -> None:
    """Set the function that puts rayrpc in the place of ``torch.distributed.rpc``.

    Args:
        install (Callable, optional): importable by name; None: torch is in its own place here.
    """
    global _install
    _install = install


def get_install() -> Callable[[], None] | None:
    """Return what ``set_install`` was given; None: torch is in its own place here."""
    return _install


@dataclass(frozen=True)
class Shim:
    """All that stands in torch's place in a script's process; its functions pickle by reference.

    Args:
        settings (dict): as ``Settings.to_dict`` returns them.
        install (Callable): puts rayrpc in the place of ``torch.distributed.rpc``.
        start_processes (Callable): takes the place of ``torch.multiprocessing``'s function of
            this name, and of ``spawn``.
    """

    settings: dict[str, Any]
    install: Callable[[], None]
    start_processes: Callable[..., Any]

    def enter(self) -> None:
        """Put rayrpc in place in this process, and in those that it starts from now on.

        Processes that are not children of ``multiprocessing`` get the settings of this moment.

        Raises:
            ConfigError: a setting is unknown or not valid.
        """
        config.use(config.Settings.from_dict(self.settings))
        self.install()
        _spawn_module.get_preparation_data = self._preparation_data
        mp: Any = torch.multiprocessing
        mp.spawn = mp.start_processes = self.start_processes
        module: Any = sys.modules["torch.multiprocessing.spawn"]  # "spawn" in mp is the function
        module.spawn = module.start_processes = self.start_processes
        parts = self, process_origin.origin_of_ranks()
        os.environ[_SHIM] = base64.b64encode(pickle.dumps(parts)).decode()
        os.environ["PYTHONPATH"] = with_folder(os.environ.get("PYTHONPATH", ""))

    def _preparation_data(self, name: str) -> dict[str, Any]:
        data: dict[str, Any] = _get_preparation_data(name)
        now = config.settings().to_dict()  # the script may have changed them
        data["rayrpc"] = _Entry(dataclasses.replace(self, settings=now))
        return data


def enter_in_child(text: str) -> None:
    """Enter the shim of the process that has started this one, not by ``multiprocessing``.

    Args:
        text: the value of the environment variable.
    """
    shim, origin = pickle.loads(base64.b64decode(text))
    process_origin.enter_subprocess(origin)
    shim.enter()


@dataclass(frozen=True)
class _Entry:
    """Enters the shim where it is unpickled; unpickles to None."""

    shim: Shim

    def __reduce__(self) -> tuple[Callable[[Shim], None], tuple[Shim]]:
        return Shim.enter, (self.shim,)
