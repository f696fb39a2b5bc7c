"""Workers' processes that have loaded torch before a program needs them.

``standby_pool``, the process of ``rayrpc up``, owns them; a program takes those it needs, in the
place of processes that Ray would start for it (``starting``):

    LOADING ──torch is loaded──> FREE ──adopt──> TAKEN ──the program ends it, or ends──> ended

A folder has an empty file for each actor that is LOADING or FREE, with its name: a program asks no
actor of another one, which may hang or be stopped there.

A process is taken only for a program of the same ``Loaded``: with the environment, as far as torch
reads it when it is loaded, and the code of torch and rayrpc that the process was started with.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from rayrpc import config
from rayrpc._concurrency.waiting import Event
from rayrpc._transports.ray.cluster import local_file
from rayrpc._transports.ray.raylet_watch import wait_for_end
from rayrpc.launch.hosted import HostedWorker
from rayrpc.launch.placement import this_node
from rayrpc.launch.program import Program

__all__ = ["Loaded", "StandbyWorker", "folder_of_free", "take"]

logger = logging.getLogger(__name__)

ADOPT_SECONDS = 20.0  # for a process that is still loading torch
ANSWER_SECONDS = 5.0  # for the answer of one that has adopted at the last moment
# How the names of variables begin that torch, and what it loads, read at that time.
_READ_AT_LOAD = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH",
)


# What workers load; ``rayrpc.startup`` is the most of it.
_NEEDED = (
    "rayrpc.startup",
    "rayrpc._transports.direct.transport",
    "rayrpc._transports.ray.directory_client",
    "rayrpc._transports.ray.transport",
    "torch.distributed.optim",
    "torch.multiprocessing",
)


class Loaded(NamedTuple):
    """What a process that has loaded torch has in it.

    Args:
        environ (dict): the part of the environment that was read then.
        torch (str): its version.
        package (str): the folder of rayrpc.
        changed (float): when a file of it was changed last, in seconds of the system's clock.
    """

    environ: dict[str, str]
    torch: str
    package: str
    changed: float

    @staticmethod
    def now(environ: Mapping[str, str]) -> Loaded:
        """Return what a process with an environment would load now."""
        package = Path(__file__).parents[1]
        changed = max(path.stat().st_mtime for path in package.rglob("*.py"))
        return Loaded(_read_at_load(environ), metadata.version("torch"), str(package), changed)


def _read_at_load(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_LOAD)}


class StandbyWorker(HostedWorker):
    """Be a worker, once a program has adopted this process.

    Args:
        loaded (Loaded): what it shall have in it.
        file (str): path of its file in ``folder_of_free``.
    """

    def __init__(self, loaded: Loaded, file: str) -> None:
        self._prepare()
        self._file = Path(file)
        for name in _read_at_load(os.environ).keys() - loaded.environ.keys():
            del os.environ[name]  # Ray sets OMP_NUM_THREADS
        os.environ.update(loaded.environ)
        self._loaded = loaded
        self._lock = threading.Lock()
        self._taken = Event()
        _load()

    def __repr__(self) -> str:
        return super().__repr__() if self._taken.is_set() else "rayrpc.StandbyWorker"

    @ray.method(concurrency_group="system")
    def adopt(
        self,
        label: str,
        program: Program,
        node_id: str,
        settings: dict[str, Any],
        owner: int,
        needed: Loaded,
        until: float,
    ) -> bool:
        """Become a worker of a program; return False if this process cannot.

        Args:
            label, program, node_id, settings: as for ``HostedWorker``.
            owner (int): id of the program's process on this node; this one ends with it.
            needed (Loaded): what the program's workers have in them.
            until (float): ``time.time()`` after which the program does not wait any more.
        """
        with self._lock:
            if self._taken.is_set() or needed != self._loaded or time.time() > until:
                return False
            self._set_taken()
        _end_with(owner)
        try:
            self._enter(label, program, node_id, settings)
        except BaseException:
            ray.kill(ray.get_runtime_context().current_actor)  # nobody can use it any more
            raise
        return True

    @ray.method(concurrency_group="system")
    def retire(self) -> bool:
        """Be taken by no program from now on; return False if one has taken this process."""
        with self._lock:
            is_free = not self._taken.is_set()
            self._set_taken()
        return is_free

    def _set_taken(self) -> None:
        self._file.unlink(missing_ok=True)
        self._taken.set()

    @ray.method(concurrency_group="watch")
    def wait_taken(self) -> None:
        """Block until a program has adopted this process."""
        self._taken.wait()

    @ray.method(concurrency_group="watch")
    def stay(self) -> None:
        """Block until this process ends."""
        Event().wait()


def _load() -> None:
    for module in _NEEDED:
        importlib.import_module(module)


def _end_with(owner: int) -> None:
    """End this process when another one on this host ends."""

    def wait() -> None:
        wait_for_end(owner)
        os._exit(1)

    threading.Thread(target=wait, name="rayrpc-owner", daemon=True).start()


def take(
    workers: Sequence[str], program: Program, settings: config.Settings
) -> dict[str, ActorHandle[HostedWorker]]:
    """Return actors that have loaded torch, for as many workers as there are such actors.

    Args:
        workers: names.
        program: what the workers run.
        settings: of the workers.

    Returns:
        The actors by worker.
    """
    actors = _standing_by(settings)
    taken: dict[str, ActorHandle[HostedWorker]] = {}
    if not actors:
        return taken
    needed = Loaded.now(program.environ)
    shared = (program, this_node(), settings.to_dict(), os.getpid(), needed)
    while actors and (left := [each for each in workers if each not in taken]):
        until = time.time() + ADOPT_SECONDS
        asked = {
            actor.adopt.remote(worker, *shared, until): (worker, actor)
            for worker, actor in zip(left, actors, strict=False)
        }
        actors = actors[len(asked) :]
        # one that does not answer is left alone: another program may just have taken it
        timeout = ADOPT_SECONDS + ANSWER_SECONDS
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        for ref in done:
            worker, actor = asked[ref]
            if _has_adopted(ref):
                taken[worker] = actor
    return taken


def folder_of_free(settings: config.Settings) -> Path:
    """Return the folder with the names of the actors that are LOADING or FREE."""
    return local_file(settings, ".standby")


def _standing_by(settings: config.Settings) -> list[Any]:
    """Return handles of the actors that may be free."""
    actors = []
    for path in sorted(folder_of_free(settings).glob("*")):
        with contextlib.suppress(ValueError):  # it has just ended
            actors.append(ray.get_actor(path.name, settings.namespace))
    return actors


def _has_adopted(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except Exception as exc:
        logger.warning("a process that had loaded torch is not used: %s", exc)
        return False
