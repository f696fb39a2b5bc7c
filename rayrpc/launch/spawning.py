"""``torch.multiprocessing.spawn``, with ranks that are Ray actors."""

from __future__ import annotations

import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from rayrpc import config
from rayrpc._concurrency.deadlines import Deadline
from rayrpc._transports.process_origin import count_ranks
from rayrpc._transports.ray.ray_errors import cause_of
from rayrpc.errors import WorkerDiedError
from rayrpc.launch import child_ranks
from rayrpc.launch.ahead import connect_for_workers
from rayrpc.launch.arguments import Arguments
from rayrpc.launch.child_ranks import ChildContext
from rayrpc.launch.hosted import Ended, HostedWorker
from rayrpc.launch.interrupt import note_interrupt
from rayrpc.launch.output import Output
from rayrpc.launch.placement import (
    check_placeable,
    near,
    placed_options,
    release_placement,
    this_node,
)
from rayrpc.launch.process import Shim, get_install
from rayrpc.launch.program import Program
from rayrpc.launch.starting import send_folder, start_hosted

__all__ = ["RankContext", "spawn", "start_processes"]

logger = logging.getLogger(__name__)

STACKS_SECONDS = 1.8  # after a Ctrl-C, for ranks to write where they are
CULPRIT_SECONDS = 1.0  # after the error of a rank that has lost another one, until that is reported
KILL_SECONDS = 0.8  # then, to end them; and to show the rest of what they printed
WAIT_SECONDS = 0.5  # at most, until Python can handle a Ctrl-C


class RankContext:
    """The ranks of one ``spawn``, with the interface of torch's ``ProcessContext``.

    ``spawn(..., join=False)`` returns one.

    Args:
        actors (list[ActorHandle]): one for each rank.
        pids (list[int]): their processes.
        refs (list[ObjectRef]): results of the actors' ``run``.
        output (Output): what the ranks print.
        options (dict): by rank's name, as ``placed_options`` returned them.

    Source: ``torch.multiprocessing.spawn.ProcessContext``.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle[HostedWorker]],
        pids: Sequence[int],
        refs: Sequence[ray.ObjectRef[Ended]],
        output: Output,
        options: dict[str, dict[str, Any]],
    ) -> None:
        self._options = options
        self._actors = actors
        self._pids = pids
        self._rank_of = {ref: rank for rank, ref in enumerate(refs)}
        self._output = output
        #: as ``spawn`` has counted them
        self.counted = 0

    def pids(self) -> list[int]:
        """Return the process id of each rank, on the rank's own node.

        Source: ``torch.multiprocessing.spawn.ProcessContext.pids``.
        """
        return list(self._pids)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for ranks to end; the first that fails ends them all.

        Args:
            timeout (float, optional): how long to wait for the next ranks to end, in seconds;
                None: without limit.
            grace_period (float, optional): how long the other ranks may run on after one has
                failed, in seconds; None: not at all.

        Returns:
            True if all ranks have ended well; False if some still run.

        Raises:
            ProcessRaisedException: a rank raised an error; the message has its traceback.
            ProcessExitedException: a rank's process died, or exited with a code other than 0.

        Source: ``torch.multiprocessing.spawn.ProcessContext.join``.
        """
        if not self._rank_of:
            return True
        try:
            for ref in self._wait(timeout):
                self._check(self._rank_of.pop(ref), ref, grace_period)
        except KeyboardInterrupt:
            note_interrupt()
            self._interrupt()
            raise
        except BaseException:
            self._end_all()
            raise
        if self._rank_of:
            return False
        self._end_all()
        return True

    def _wait(self, timeout: float | None) -> list[ray.ObjectRef[Ended]]:
        """Return the results that are there, as soon as there is one."""
        deadline = Deadline(timeout)
        while True:
            # not all of it at once: between waits, Python handles a Ctrl-C whatever Ray does
            step = deadline.within(WAIT_SECONDS)
            ready, _ = ray.wait(list(self._rank_of), timeout=step)
            if ready or deadline.expired:
                return list(ready)

    def _check(self, rank: int, ref: ray.ObjectRef[Ended], grace_period: float | None) -> None:
        pid = self._pids[rank]
        try:
            ended = ray.get(ref)
        except RayActorError as exc:
            self._output.wait_ended([f"rank{rank}"])
            status = self._output.exit_statuses.get(f"rank{rank}")
            if status is None:
                self._wait_for_others(grace_period)
                raise ProcessExitedException(
                    f"process {rank} (pid {pid}) terminated: {_cause_of(exc)}", rank, pid, 1
                ) from None
            ended = Ended(status)
        ray.kill(self._actors[rank])  # a plain process, too, ends with its main
        self._output.wait_ended([f"rank{rank}"])
        if ended.exit_code == 0:
            return
        if WorkerDiedError.__name__ in ended.trace:
            self._check_culprit(grace_period)
        self._wait_for_others(grace_period)
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

    def _check_culprit(self, grace_period: float | None) -> None:
        """Report the rank whose process has died, and not those that have noticed it."""
        others = list(self._rank_of)
        if not others:
            return
        for ref in ray.wait(others, num_returns=len(others), timeout=CULPRIT_SECONDS)[0]:
            try:
                ray.get(ref)
            except RayActorError:
                self._check(self._rank_of.pop(ref), ref, grace_period)

    def _wait_for_others(self, grace_period: float | None) -> None:
        if grace_period and self._rank_of:
            ray.wait(list(self._rank_of), num_returns=len(self._rank_of), timeout=grace_period)

    def _end_all(self) -> None:
        """End the ranks, and show the rest of what they printed."""
        self._kill_all()
        self._output.close()

    def _kill_all(self) -> None:
        counted, self.counted = self.counted, 0
        count_ranks(-counted)
        for actor in self._actors:
            ray.kill(actor)
        release_placement(self._options)

    def _interrupt(self) -> None:
        """Show where the ranks are, and end them; Ray may hang."""
        running = [f"rank{rank}" for rank in self._rank_of.values()]
        self._output.show_stacks(running, STACKS_SECONDS)
        killer = threading.Thread(target=self._kill_all, daemon=True)
        killer.start()
        killer.join(KILL_SECONDS)
        self._output.close(KILL_SECONDS)


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: str = "spawn",
) -> RankContext: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> RankContext | None: ...


def spawn(
    fn: Callable[..., object],
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
        fn (Callable): called as ``fn(rank, *args)``; its result is ignored.
        args (tuple): its further arguments.  Ranks on this node share the tensors in them with
            this process, as ``multiprocessing``'s children do; ranks on others have copies.
        nprocs (int): how many ranks.
        join (bool): wait for all of them.
        daemon (bool): accepted and ignored; ranks always end with the process that started them.
        start_method (str): accepted as torch does: only "spawn" has a meaning.

    Returns:
        None if ``join``, else a context to join.

    Raises:
        PlacementError: a rank asks for resources that no node has, or that did not become free; or
            it is on another node, and an argument is in shared memory, or a pipe or socket.
        ConfigError: a rank is on a host without the program's folder, which is too large to send.
        ProcessRaisedException, ProcessExitedException: a rank failed; see ``RankContext.join``.
        RuntimeError: an argument can only be inherited (a queue or lock of ``multiprocessing``).

    Source: ``torch.multiprocessing.spawn``.
    """
    if start_method != "spawn":
        warnings.warn(
            f"rayrpc.spawn starts actors; start_method={start_method!r} is ignored", stacklevel=2
        )
    count_ranks(nprocs)
    try:
        context = _start(fn, args, nprocs)
    except BaseException:
        count_ranks(-nprocs)
        raise
    context.counted = nprocs
    if not join:
        return context
    while not context.join():
        pass
    return None


def _start(fn: Callable[..., object], args: tuple[Any, ...], nprocs: int) -> RankContext:
    settings = config.settings()
    program = Program.of_this_process(settings.working_dir)
    arguments = Arguments(fn, args, by_value=not (program.path or program.module))
    connect_for_workers(settings)
    wanted = {f"rank{rank}": settings.resources_for(f"rank{rank}") for rank in range(nprocs)}
    check_placeable(wanted)
    options = placed_options(wanted, settings.placement_strategy, settings.placement_timeout)
    enter_shim = _dump_shim(settings)
    here = this_node()
    placed = near(options, wanted, here) if arguments.tied else options
    actors: dict[str, ActorHandle[HostedWorker]] = {}
    output: Output | None = None
    try:
        actors, pids = start_hosted(program, settings, wanted, placed)
        nodes = ray.get([actor.node_id.remote() for actor in actors.values()])
        targets = arguments.targets(nodes, here)
        folders = send_folder(program, settings, list(actors.values()))
        output = Output(actors, settings)
        refs = [
            actor.run.options(name=name).remote(
                rank, targets[rank], enter_shim, output.addresses.get(name), folders[rank]
            )
            for rank, (name, actor) in enumerate(actors.items())
        ]
    except BaseException:
        for actor in actors.values():
            ray.kill(actor)
        release_placement(options)
        if output is not None:
            output.close()
        raise
    return RankContext(list(actors.values()), list(pids.values()), refs, output, options)


def _cause_of(error: RayActorError) -> str:
    """Return why Ray has ended a rank, in one line."""
    if "owner has died" in str(error):  # which is this process
        return "Ray has ended it, as the Ray node of the process that started it has ended"
    return cause_of(error)


def _dump_shim(settings: config.Settings) -> bytes | None:
    """Return what ``HostedWorker.run`` calls, so that ranks have rayrpc in place if we have."""
    install = get_install()
    if install is None:
        return None
    own = settings.replace(log_dir=None)  # see start_hosted
    return pickle.dumps(Shim(own.to_dict(), install, start_processes).enter)


def start_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> RankContext | ChildContext | None:
    """Stand for ``torch.multiprocessing.start_processes`` and ``spawn`` in a script.

    What only children of this process can do stays with torch: another start method than
    "spawn", and arguments that must be inherited (queues, locks, events).  Such ranks are
    processes of their own, and attach to the cluster when they call ``init_rpc``.

    Args:
        fn, args, nprocs, join, daemon: see ``spawn``.
        start_method (str): "spawn" for actors; any other is torch's.

    Returns:
        None if ``join``, else a context to join.

    Raises:
        PlacementError, ProcessRaisedException, ProcessExitedException: see ``spawn``.

    Source: ``torch.multiprocessing.start_processes``.
    """
    if start_method == "spawn":
        try:
            return spawn(fn, args, nprocs, join, daemon)
        except RuntimeError as exc:
            if "through inheritance" not in str(exc):
                raise
            logger.warning("ranks stay processes of this machine: %s", exc)
    return child_ranks.start_processes(fn, args, nprocs, join, daemon, start_method)
