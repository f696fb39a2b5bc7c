"""``torch.multiprocessing.spawn``, with ranks that are Ray actors."""

from __future__ import annotations

import logging
import math
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import ray
import torch.multiprocessing
from ray.exceptions import RayActorError
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from rayrpc import compat, config
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.transport import cause_of
from rayrpc.launch.hosted import Ended, hosted_actor
from rayrpc.launch.output import follow
from rayrpc.launch.placement import (
    check_placeable,
    free_group,
    named,
    placed_options,
    this_node,
    wait_placed,
)
from rayrpc.launch.program import Program

__all__ = ["RankContext", "spawn"]

logger = logging.getLogger(__name__)

OUTPUT_SECONDS = 5.0
TURN_SECONDS = 0.5


class RankContext:
    """The ranks of one ``spawn``, with the interface of torch's ``ProcessContext``.

    Args:
        actors: one a rank.
        pids: their processes.
        refs: of their mains.
        outputs: threads that follow what they print.
        options: that Ray got for each.
    """

    def __init__(
        self,
        actors: list[Any],
        pids: list[int],
        refs: list[Any],
        outputs: list[Any],
        options: dict[str, dict[str, Any]],
    ) -> None:
        self._options = options
        self._actors = actors
        self._pids = pids
        self._rank_of = {ref: rank for rank, ref in enumerate(refs)}
        self._outputs = outputs

    def pids(self) -> list[int]:
        """Return the process of each rank."""
        return list(self._pids)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for ranks to end; the first that fails ends them all.

        Args:
            timeout (float, optional): how long to wait in seconds.
            grace_period (float, optional): how long the others get to end by themselves.

        Returns:
            True if all have ended well.

        Raises:
            ProcessRaisedException: a rank raised; with its traceback.
            ProcessExitedException: a rank's process died, or exited with a code other than 0.
        """
        if not self._rank_of:
            return True
        try:
            for ref in self._wait(timeout):
                self._check(self._rank_of.pop(ref), ref, grace_period)
        except BaseException:
            self._end_all()
            raise
        if self._rank_of:
            return False
        self._end_all()
        return True

    def _wait(self, timeout: float | None) -> list[Any]:
        """Return the mains that have ended, as soon as one has."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            # in short turns: between them, Python sees a Ctrl-C whatever Ray does with it
            ready, _ = ray.wait(list(self._rank_of), timeout=max(0.0, min(left, TURN_SECONDS)))
            if ready or left <= TURN_SECONDS:
                return list(ready)

    def _check(self, rank: int, ref: Any, grace_period: float | None) -> None:
        pid = self._pids[rank]
        try:
            ended: Ended = ray.get(ref)
        except RayActorError as exc:
            self._linger(grace_period)
            raise ProcessExitedException(
                f"process {rank} (pid {pid}) terminated: {cause_of(exc)}", rank, pid, 1
            ) from None
        self._outputs[rank].join(OUTPUT_SECONDS)
        ray.kill(self._actors[rank])  # its main is done; so is a plain process then
        if ended.exit_code == 0:
            return
        self._linger(grace_period)
        if ended.trace:
            raise ProcessRaisedException(
                f"\n\n-- Process {rank} terminated with the following error:\n{ended.trace}",
                rank,
                pid,
            )
        raise ProcessExitedException(
            f"process {rank} terminated with exit code {ended.exit_code}",
            rank,
            pid,
            ended.exit_code,
        )

    def _linger(self, grace_period: float | None) -> None:
        if grace_period and self._rank_of:
            ray.wait(list(self._rank_of), num_returns=len(self._rank_of), timeout=grace_period)

    def _end_all(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        free_group(self._options)
        end = time.monotonic() + OUTPUT_SECONDS
        for output in self._outputs:
            output.join(max(0.0, end - time.monotonic()))


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> RankContext | None:
    """Run ``fn(rank, *args)`` in ``nprocs`` Ray actors, as ``torch.multiprocessing.spawn`` does.

    The ranks ask Ray for nothing, unless the setting ``workers`` has a pattern that matches
    ``rank0``, ``rank1``, ...  They load this process's script as ``multiprocessing`` would.

    Args:
        fn (Callable): called as ``fn(rank, *args)``.
        args (tuple): its further arguments.
        nprocs (int): how many ranks.
        join (bool): wait for all of them.
        daemon (bool): accepted; ranks always end with the process that started them.
        start_method (str): accepted as torch does: only "spawn" has a meaning.

    Returns:
        None if ``join``, else a context to join.

    Raises:
        PlacementError: a rank asks for resources that no node has, or that did not become free.
        ProcessRaisedException, ProcessExitedException: as ``RankContext.join``.

    Source: ``torch.multiprocessing.spawn``.
    """
    if start_method != "spawn":
        warnings.warn(
            f"rayrpc.spawn starts actors; start_method={start_method!r} is ignored", stacklevel=2
        )
    program = Program.of_this_process()
    target = _dump(fn, args, by_value=not (program.path or program.module))
    settings = config.settings()
    connect(settings)
    wanted = {f"rank{rank}": settings.resources_for(f"rank{rank}") for rank in range(nprocs)}
    check_placeable(wanted)
    options = placed_options(wanted, settings.placement_strategy, settings.placement_timeout)
    worker = hosted_actor()
    shared = (
        program,
        this_node(),
        settings.to_dict(),
        compat.is_installed(),
        settings.log_to_terminal,
    )
    actors = [
        worker.options(**options[name], **named(name, settings)).remote(name, *shared)
        for name in wanted
    ]
    try:
        pids = wait_placed(
            dict(zip(wanted, actors, strict=True)), wanted, settings.placement_timeout
        )
        outputs = [follow(actor, ray.get) for actor in actors]
        refs = [actor.run.remote(rank, target) for rank, actor in enumerate(actors)]
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        free_group(options)
        raise
    context = RankContext(actors, list(pids.values()), refs, outputs, options)
    if not join:
        return context
    while not context.join():
        pass
    return None


def _dump(fn: Any, args: Any, by_value: bool) -> bytes:
    if by_value:  # a notebook's functions are nowhere else
        return bytes(cloudpickle.dumps((fn, args), 5))
    try:
        return pickle.dumps((fn, args), 5)
    except RuntimeError:
        raise  # a queue or a lock of multiprocessing: only its own children can inherit it
    except Exception:
        return bytes(cloudpickle.dumps((fn, args), 5))


_mp: Any = torch.multiprocessing
_spawn_processes = _mp.start_processes


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Stand for ``torch.multiprocessing.start_processes`` and ``spawn`` in a script.

    What only children of this process can do stays with torch: another start method than
    "spawn", and arguments that must be inherited (queues, locks, events).  Such ranks are
    processes of their own, and attach to the cluster when they call ``init_rpc``.
    """
    if start_method == "spawn":
        try:
            return spawn(fn, args, nprocs, join, daemon)
        except RuntimeError as exc:
            if "through inheritance" not in str(exc):
                raise
            logger.warning("ranks stay processes of this machine: %s", exc)
    return _spawn_processes(fn, args, nprocs, join, daemon, start_method)
