"""Workers' processes that have loaded torch before a program needs them.

``standby_pool``, the process of ``rayrpc up``, owns them; a program takes those it needs, in the
place of processes that Ray would start for it (``starting``):

    LOADING ──torch is loaded──> FREE ──adopt──> TAKEN ──the program ends it, or ends──> ended

A process is taken only for a program whose environment, as far as torch reads it when it is loaded,
is the one that it was started with.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrpc import config
from rayrpc._concurrency.waiting import Event
from rayrpc._transports.ray.raylet_watch import wait_for_end
from rayrpc.launch.hosted import HostedWorker
from rayrpc.launch.placement import this_node
from rayrpc.launch.program import Program

__all__ = ["PREFIX", "StandbyWorker", "read_at_load", "take"]

logger = logging.getLogger(__name__)

#: how the names of these actors begin
PREFIX = "standby-"
ADOPT_SECONDS = 20.0  # for a process that is still loading torch
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


def read_at_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is read when torch is loaded."""
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_LOAD)}


class StandbyWorker(HostedWorker):
    """Be a worker, once a program has adopted this process.

    Args:
        environ (dict): as ``read_at_load`` returns it: to load torch with.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self._prepare()
        for name in read_at_load(os.environ).keys() - environ.keys():
            del os.environ[name]  # Ray sets OMP_NUM_THREADS
        os.environ.update(environ)
        self._environ = environ
        self._lock = threading.Lock()
        self._taken = Event()
        _load()

    def __repr__(self) -> str:
        return super().__repr__() if self._taken.is_set() else "rayrpc.StandbyWorker"

    @ray.method(concurrency_group="system")
    def adopt(
        self, label: str, program: Program, node_id: str, settings: dict[str, Any], owner: int
    ) -> bool:
        """Become a worker of a program; return False if this process cannot.

        Args:
            label, program, node_id, settings: as for ``HostedWorker``.
            owner (int): id of the program's process on this node; this one ends with it.
        """
        with self._lock:
            if self._taken.is_set() or read_at_load(program.environ) != self._environ:
                return False
            self._taken.set()
        _end_with(owner)
        self._enter(label, program, node_id, settings)
        return True

    @ray.method(concurrency_group="system")
    def retire(self) -> bool:
        """Be taken by no program from now on; return False if one has taken this process."""
        with self._lock:
            is_free = not self._taken.is_set()
            self._taken.set()
        return is_free

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
    actors = _standing_by(settings.namespace)
    taken: dict[str, ActorHandle[HostedWorker]] = {}
    arguments = (program, this_node(), settings.to_dict(), os.getpid())
    while actors and (left := [each for each in workers if each not in taken]):
        asked = {
            actor.adopt.remote(worker, *arguments): (worker, actor)
            for worker, actor in zip(left, actors, strict=False)
        }
        actors = actors[len(asked) :]
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ADOPT_SECONDS)
        for ref in done:
            worker, actor = asked[ref]
            if _has_adopted(ref, actor):
                taken[worker] = actor
        for ref in late:
            ray.kill(asked[ref][1])
    return taken


def _standing_by(namespace: str) -> list[Any]:
    """Return handles of the actors that may be free."""
    named: Iterable[Mapping[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    actors = []
    for each in named:
        if each["name"].startswith(PREFIX) and each["namespace"] == namespace:
            try:
                actors.append(ray.get_actor(each["name"], namespace))
            except ValueError:  # it has just ended
                continue
    return actors


def _has_adopted(ref: Any, actor: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except Exception as exc:
        logger.warning("a process that had loaded torch is not used: %s", exc)
        ray.kill(actor)
        return False
