"""The actor that is a worker: its process runs the rank's main and serves the rank's calls.

Torch must see the program's environment, so it is loaded only after ``Program.enter``: modules
that import torch are imported inside methods here, and callables arrive as pickled bytes.  A
process that was forked with torch has loaded it in that environment (``preloading``).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import accelerators

from rayrpc import config
from rayrpc._transports.ray.endpoint import HostedEndpoint, Wire, hosted_endpoint
from rayrpc._transports.ray.local_lease import hold_local_cluster
from rayrpc._transports.ray.raylet_watch import LOST_SECONDS, end_with_raylet
from rayrpc.launch.capture import Capture
from rayrpc.launch.folder import Archive, unpack
from rayrpc.launch.program import Program

__all__ = ["CONCURRENCY_GROUPS", "Ended", "HostedWorker", "Target"]

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"rpc": 16, "system": 4, "watch": 4, "main": 1}


@dataclass(frozen=True)
class Ended:
    """How a rank's main ended.

    Args:
        exit_code (int): 0 after success.
        trace (str): the traceback of an exception, or the message of ``sys.exit(message)``.
    """

    exit_code: int = 0
    trace: str = ""


@dataclass(frozen=True)
class Target:
    """What a rank runs.

    Args:
        pickled (bytes): ``(fn, args)``.
        authkey (bytes): of ``multiprocessing`` in the starting process; empty on other nodes.
    """

    pickled: bytes
    authkey: bytes = b""

    def load(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """Return ``fn`` and ``args``."""
        if self.authkey:  # as a child of that process has it
            multiprocessing.current_process().authkey = self.authkey
        fn, args = pickle.loads(self.pickled)
        return fn, args


def _variables_of_devices(context: Any) -> list[str]:
    """Return the variables in which Ray has named devices for this actor.

    Args:
        context: Ray's, of the actor.
    """
    kinds = [kind for kind, devices in context.get_accelerator_ids().items() if devices]
    managers: list[Any] = list(map(accelerators.get_accelerator_manager_for_resource, kinds))
    return [manager.get_visible_accelerator_ids_env_var() for manager in managers]


class HostedWorker:
    """Run one worker: the actor that runs a rank's main and serves its calls.

    Args:
        label (str): what Ray's dashboard shows.
        program (Program): what the starting process runs.
        node_id (str): of the starting process.
        settings (dict): of the worker, as ``Settings.to_dict`` returns them.
    """

    def __init__(
        self,
        label: str,
        program: Program,
        node_id: str,
        settings: dict[str, Any],
    ) -> None:
        end_with_raylet(after=LOST_SECONDS)  # until the group is notified
        # between tasks, `ps` shows the name of the class; one for each actor in Ray costs 15 ms
        self.__class__ = type(label, (type(self),), {})
        self._label = label
        self._program = program
        context = ray.get_runtime_context()
        program.enter(context.get_node_id() == node_id, kept=_variables_of_devices(context))
        self._cluster = context.gcs_address
        os.environ["RAY_ADDRESS"] = self._cluster  # for children of this process
        if "RAYRPC_ADDRESS" in os.environ:  # it may be "local", or for outside of the cluster
            os.environ["RAYRPC_ADDRESS"] = self._cluster
        config.use(config.Settings.from_dict(settings).replace(address=self._cluster))
        self._capture: Capture | None = None
        self._endpoint = HostedEndpoint(context.get_actor_name() or "", CONCURRENCY_GROUPS["rpc"])
        hosted_endpoint(self._endpoint)

    def __repr__(self) -> str:
        return f"rayrpc.Worker({self._label})"

    # -- an actor endpoint, as Relay ----------------------------------------------------------

    @ray.method(concurrency_group="rpc")
    def handle(self, wire: Wire) -> Wire:
        """Serve a peer's frame."""
        return self._endpoint.call(wire)

    @ray.method(concurrency_group="system")
    def deliver(self, call_id: int, wire: Wire) -> None:
        """Accept the late reply to a call."""
        self._endpoint.deliver(call_id, wire)

    @ray.method(concurrency_group="system")
    def inspect(self, wire: Wire, seconds: float) -> Wire:
        """Answer a question about the worker."""
        return self._endpoint.call(wire)

    @ray.method(concurrency_group="watch")
    def watch(self, token: str) -> None:
        """Block until the worker leaves; fail if it dies."""
        self._endpoint.watch.wait(token)

    # -- a rank -------------------------------------------------------------------------------

    @ray.method(concurrency_group="system")
    def pid(self) -> int:
        """Return the id of the worker's process."""
        return os.getpid()

    @ray.method(concurrency_group="system")
    def node_id(self) -> str:
        """Return the id of the worker's node."""
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="system")
    def lacks_folder(self) -> bool:
        """Tell whether the worker's node has no folder of the program."""
        return self._program.lacks_folder

    def _enter_folder(self, archive: Archive | None) -> None:
        if archive is not None:
            self._program = self._program.move(unpack(archive))

    @ray.method(concurrency_group="main")
    def run(
        self,
        rank: int,
        target: Target,
        enter_shim: bytes | None,
        collector: str | None,
        archive: Archive | None = None,
    ) -> Ended:
        """Load the program, and run the rank's main.

        Args:
            rank (int): first argument of the main.
            target (Target): ``fn`` and ``args``; ``fn(rank, *args)`` is called.
            enter_shim (bytes, optional): a pickled function to call before the program is loaded.
            collector (str, optional): address of the collector of output; None: it is left to Ray.
            archive (Archive, optional): of the program's folder, if this node lacks it.

        Returns:
            Ended: how the main ended; its exceptions are in there, too.
        """
        threading.current_thread().name = "MainThread"  # as in a process of multiprocessing
        self._start_capture(collector)
        try:
            self._enter_folder(archive)
            if enter_shim is not None:
                pickle.loads(enter_shim)()
                config.use(config.settings().replace(address=self._cluster))
            self._program.load()
            fn, args = target.load()
            fn(rank, *args)
            return Ended()
        except SystemExit as exc:
            if exc.code is None or isinstance(exc.code, int):
                return Ended(exc.code or 0)
            return Ended(1, str(exc.code))
        except BaseException:
            return Ended(1, traceback.format_exc())
        finally:
            if self._capture is not None:
                self._capture.close()

    def _start_capture(self, collector: str | None, marks_cells: bool = False) -> None:
        # not in __init__: after that, Ray writes marks for its own log files
        if collector is None:
            return
        try:
            self._capture = Capture(collector, self._label, marks_cells)
        except OSError as exc:
            logger.warning(
                "worker %r cannot reach the collector of output at %s (%s): what it prints is in "
                "Ray's log files",
                self._label,
                collector,
                exc,
            )

    # -- a server -----------------------------------------------------------------------------

    @ray.method(concurrency_group="main")
    def join_group(
        self,
        name: str,
        init_method: str,
        collector: str | None,
        archive: Archive | None = None,
        is_detached: bool = False,
        restarts: int = 0,
        is_held: bool = False,
        marks_cells: bool = False,
    ) -> None:
        """Join a dynamic group, and serve its calls.

        Args:
            name (str): of this worker.
            init_method (str): names the group.
            collector (str, optional), archive (Archive, optional): see ``run``.
            is_detached (bool): the worker outlives its program; a local cluster then stays, too.
            restarts (int): how often it is started again if it dies; -1: always.
            is_held (bool): calls wait until its slots are released.
            marks_cells (bool): see ``Capture``.
        """
        self._start_capture(collector, marks_cells)
        self._enter_folder(archive)
        if is_detached:
            hold_local_cluster()
        from rayrpc import api, startup

        options = startup.default_options(config.settings())
        options.init_method = init_method
        agent = startup.make_agent(
            name, -1, None, options, config.settings(), api.user_api, restarts=restarts
        )
        if is_held:
            agent.slots.hold()
        api._init_rpc_states(agent)
        if self._capture is not None:
            capture = self._capture
            agent.callee.before_reply(lambda *_: capture.sync())
            if marks_cells:
                from rayrpc.launch.cell_hook import follow_cells_of_calls

                follow_cells_of_calls(agent)

    @ray.method(concurrency_group="main")
    def leave_group(self) -> None:
        """Leave the group, and wait until all that was printed is shown."""
        from rayrpc import api
        from rayrpc._runtime import current

        if current.is_set():
            api.shutdown(graceful=False)
        if self._capture is not None:
            self._capture.close()
