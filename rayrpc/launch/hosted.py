"""The actor that is a worker: its process runs the rank's main and serves the rank's calls.

Torch is imported only when the program is, after the environment is the program's.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import ray

from rayrpc import config
from rayrpc._transports.ray.endpoint import HostedEndpoint, Wire, hosted_endpoint
from rayrpc.launch.output import Capture
from rayrpc.launch.program import Program

__all__ = ["Ended", "HostedWorker", "hosted_actor"]

GROUPS = {"rpc": 16, "system": 4, "watch": 4, "main": 1, "output": 1}


@dataclass(frozen=True)
class Ended:
    """How a rank's main ended.

    Args:
        exit_code (int): 0 if well.
        trace (str): the traceback of an exception.
    """

    exit_code: int = 0
    trace: str = ""


class HostedWorker:
    """Be a worker.

    Args:
        label (str): what Ray's dashboard shows.
        program (Program): what the starting process runs.
        node_id (str): of the starting process.
        settings (dict): of the starting process.
        installed (bool): rayrpc is in the place of ``torch.distributed.rpc`` there.
        capture (bool): what is printed goes to the starting process.
    """

    def __init__(
        self,
        label: str,
        program: Program,
        node_id: str,
        settings: dict[str, Any],
        installed: bool,
        capture: bool,
    ) -> None:
        self._label = label
        self._program = program
        self._installed = installed
        context = ray.get_runtime_context()
        program.enter(same_node=context.get_node_id() == node_id)
        config.use(config.Settings.from_dict(settings))
        self._captures = capture
        self._capture: Capture | None = None
        self._capturing = threading.Event()
        self._endpoint = HostedEndpoint(context.get_actor_name() or "", GROUPS["rpc"])
        hosted_endpoint(self._endpoint)

    def __repr__(self) -> str:
        return f"rayrpc.Worker({self._label})"

    # -- a stand-in, as Relay -----------------------------------------------------------------

    @ray.method(concurrency_group="rpc")
    def handle(self, wire: Wire) -> Wire:
        """Serve a peer's frame."""
        return self._endpoint.call(wire)

    @ray.method(concurrency_group="system")
    def deliver(self, call_id: int, wire: Wire) -> None:
        """Take the late reply to a call."""
        self._endpoint.deliver(call_id, wire)

    @ray.method(concurrency_group="watch")
    def watch(self, token: str) -> None:
        """Block until the worker leaves; fail if it dies."""
        self._endpoint.watch.wait(token)

    # -- a rank -------------------------------------------------------------------------------

    @ray.method(concurrency_group="system")
    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    @ray.method(concurrency_group="main")
    def run(self, rank: int, target: bytes) -> Ended:
        """Load the program, and run ``fn(rank, *args)`` that ``target`` holds, pickled."""
        self._start_capture()
        try:
            self._enter()
            fn, args = pickle.loads(target)
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

    def _start_capture(self) -> None:
        # not in __init__: after that, Ray writes marks for its own log files
        if self._captures:
            self._capture = Capture()
        self._capturing.set()

    def _enter(self) -> None:
        if self._installed:
            from rayrpc.launch.process import enter

            enter(config.settings().to_dict())
        self._program.load()

    @ray.method(concurrency_group="output")
    def read_output(self) -> list[tuple[int, bytes]] | None:
        """Return what was printed, as soon as there is some; None at the end."""
        self._capturing.wait()
        return self._capture.take() if self._capture is not None else None

    # -- a server -----------------------------------------------------------------------------

    @ray.method(concurrency_group="main")
    def join_group(self, name: str, init_method: str) -> None:
        """Join a dynamic group, and serve its calls."""
        self._start_capture()
        from rayrpc import api, startup

        options = startup.default_options(config.settings())
        options.init_method = init_method
        api.init_rpc(name, rpc_backend_options=options)

    @ray.method(concurrency_group="main")
    def leave_group(self) -> None:
        """Leave the group."""
        from rayrpc import api
        from rayrpc._runtime import current

        if current.is_set():
            api.shutdown(graceful=False)
        if self._capture is not None:
            self._capture.close()


def hosted_actor() -> Any:
    """Return the actor class, which asks Ray for nothing unless told to."""
    remote: Any = ray.remote
    return remote(num_cpus=0, concurrency_groups=GROUPS)(HostedWorker)
