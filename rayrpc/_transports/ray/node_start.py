"""Start the nodes of Ray that this process starts in less time than Ray does.

Ray has no options for what is done here.  Where a release has other names for it, that release
starts its nodes in its own way.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import subprocess
import sys
from typing import Any

from rayrpc._transports.ray import start_daemon, start_worker

__all__ = ["adapt_start", "start_monitors"]

logger = logging.getLogger(__name__)

# How the arguments of the raylet begin that are the command lines of daemons.
_AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")


@functools.cache
def adapt_start(late_monitors: bool = False) -> None:
    """Change how Ray starts nodes in this process.

    - A node whose process has a fork server runs ``start_worker`` for each worker.
    - A head node without a dashboard has no API server, which would serve nothing but Ray's usage
      statistics, and which the node waits for.
    - Beside JupyterLab, a node's daemons are run by ``start_daemon``.

    Args:
        late_monitors (bool): the autoscaler's monitor and the one of log files, which load for as
            long as all else, are left to ``start_monitors``.
    """
    from ray._private import parameter, services

    init: Any = parameter.RayParams.__init__
    start_api_server: Any = services.start_api_server

    @functools.wraps(init)
    def init_adapted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if start_worker.SERVER in os.environ:
            self.setup_worker_path = start_worker.__file__
        if late_monitors:
            self.no_monitor = True
            self.include_log_monitor = False

    @functools.wraps(start_api_server)
    def start_if_asked_for(include_dashboard: bool | None, *args: Any, **kwargs: Any) -> Any:
        if include_dashboard is False:
            return None, None  # as where it has failed
        return start_api_server(include_dashboard, *args, **kwargs)

    setattr(parameter.RayParams, "__init__", init_adapted)  # noqa: B010 - mypy refuses the other
    services.start_api_server = start_if_asked_for
    if importlib.util.find_spec(start_daemon.LEFT_OUT) is not None:
        _run_daemons(services)


def _run_daemons(services: Any) -> None:
    """Have Ray's daemons be run by ``start_daemon``.

    Args:
        services: Ray's module that starts processes.
    """
    start_ray_process = services.start_ray_process
    programs = services.RAY_PATH + os.sep
    runner = subprocess.list2cmdline([start_daemon.__file__])  # as Ray quotes

    @functools.wraps(start_ray_process)
    def start_process(command: list[str], *args: Any, **kwargs: Any) -> Any:
        is_python = command[0] == sys.executable
        adapted = []
        for word in command:
            if is_python and word.startswith(programs):
                adapted.append(start_daemon.__file__)
                is_python = False
            elif word.startswith(_AGENTS):
                word = word.replace(f" {programs}", f" {runner} {programs}", 1)
            adapted.append(word)
        return start_ray_process(adapted, *args, **kwargs)

    services.start_ray_process = start_process


def start_monitors() -> None:
    """Start what ``adapt_start`` has left out, for the node that ``ray.init`` has started here."""
    from ray._private import worker

    node: Any = worker._global_node
    try:
        node.start_log_monitor()
        node.start_monitor()
    except Exception:
        logger.warning("`ray status` and the logs of Ray's drivers may be empty", exc_info=True)
