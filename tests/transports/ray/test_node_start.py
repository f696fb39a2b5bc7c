"""How this process starts Ray's nodes; Ray's own functions are replaced."""

import importlib.util
import logging
import os
import sys
import types
from typing import Any

import pytest
from ray._private import parameter as ray_parameter
from ray._private import services as ray_services
from ray._private import worker

from rayrpc._transports.ray import start_daemon, start_worker
from rayrpc._transports.ray.node_start import adapt_start, start_monitors

# with stand-ins for their functions
parameter: Any = ray_parameter
services: Any = ray_services


class Started:
    """What Ray was asked to start."""

    def __init__(self):
        self.servers, self.commands = [], []


@pytest.fixture
def started(monkeypatch):
    """Have Ray start nothing; its functions are as they were before once the test is over."""
    started = Started()

    def init(self, **options):
        self.setup_worker_path = "Ray's own"
        self.no_monitor = False
        self.include_log_monitor = True
        vars(self).update(options)

    def start_api_server(include_dashboard, *args, **kwargs):
        started.servers.append((include_dashboard, args))
        return "address", "process"

    def start_ray_process(command, *args, **kwargs):
        started.commands.append(command)
        return "process"

    monkeypatch.setattr(parameter.RayParams, "__init__", init)
    monkeypatch.setattr(services, "start_api_server", start_api_server)
    monkeypatch.setattr(services, "start_ray_process", start_ray_process)
    monkeypatch.delenv(start_worker.SERVER, raising=False)
    return started


def adapt(monkeypatch, beside_jupyterlab=False, **options):
    """Adapt Ray's functions, though this process may have done so before."""
    find_spec = importlib.util.find_spec

    def find(name, *args):
        if name == start_daemon.LEFT_OUT:
            return object() if beside_jupyterlab else None
        return find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    adapt_start.__wrapped__(**options)


class TestParameters:
    def test_workers_are_rays_own_where_no_fork_server_runs(self, started, monkeypatch):
        adapt(monkeypatch)
        made = parameter.RayParams(num_cpus=3)
        assert made.setup_worker_path == "Ray's own" and made.num_cpus == 3

    def test_they_are_started_by_rayrpc_where_one_runs(self, started, monkeypatch):
        adapt(monkeypatch)
        monkeypatch.setenv(start_worker.SERVER, "/there/a.forks")  # when a node is made
        assert parameter.RayParams().setup_worker_path == start_worker.__file__

    @pytest.mark.parametrize("late", [True, False])
    def test_monitors_are_left_for_later_where_that_is_asked(self, started, monkeypatch, late):
        adapt(monkeypatch, late_monitors=late)
        made = parameter.RayParams()
        assert (made.no_monitor, made.include_log_monitor) == (late, not late)


class TestApiServer:
    def test_a_node_without_a_dashboard_has_none(self, started, monkeypatch):
        adapt(monkeypatch)
        assert services.start_api_server(False, "host") == (None, None)
        assert not started.servers

    @pytest.mark.parametrize("asked", [True, None])
    def test_one_that_is_asked_for_or_may_be_there_is_started(self, started, monkeypatch, asked):
        adapt(monkeypatch)
        assert services.start_api_server(asked, "host") == ("address", "process")
        assert started.servers == [(asked, ("host",))]


class TestDaemons:
    PROGRAM = services.RAY_PATH + os.sep + "_private/log_monitor.py"

    def test_they_are_rays_own_elsewhere(self, started, monkeypatch):
        adapt(monkeypatch)
        services.start_ray_process([sys.executable, self.PROGRAM])
        assert started.commands == [[sys.executable, self.PROGRAM]]

    def test_beside_jupyterlab_python_programs_of_ray_are_run_by_rayrpc(self, started, monkeypatch):
        adapt(monkeypatch, beside_jupyterlab=True)
        command = [sys.executable, "-u", self.PROGRAM, "--log", self.PROGRAM]
        assert services.start_ray_process(command, "monitor") == "process"
        runner = start_daemon.__file__
        assert started.commands == [
            [sys.executable, "-u", runner, self.PROGRAM, "--log", self.PROGRAM]
        ]

    def test_so_are_the_agents_that_the_raylet_starts(self, started, monkeypatch):
        adapt(monkeypatch, beside_jupyterlab=True)
        agent = services.RAY_PATH + os.sep + "dashboard/agent.py"
        raylet = services.RAY_PATH + os.sep + "core/raylet"
        services.start_ray_process(
            [
                raylet,
                f"--dashboard_agent_command={sys.executable} -u {agent} --port=1 --log={agent}",
                f"--runtime_env_agent_command={sys.executable} {agent}",
                f"--python_worker_command={sys.executable} {agent}",
            ]
        )
        ((program, dashboard, runtime_env, workers),) = started.commands
        runner = start_daemon.__file__
        assert program == raylet  # is no Python
        assert dashboard.endswith(f"-u {runner} {agent} --port=1 --log={agent}")
        assert runtime_env.endswith(f"{sys.executable} {runner} {agent}")
        assert runner not in workers

    def test_other_programs_of_python_are_left_alone(self, started, monkeypatch):
        adapt(monkeypatch, beside_jupyterlab=True)
        command = [sys.executable, "/home/me/program.py"]
        services.start_ray_process(command)
        assert started.commands == [command]


class TestMonitors:
    def test_both_are_started_of_this_processs_node(self, monkeypatch):
        began = []
        node = types.SimpleNamespace(
            start_log_monitor=lambda: began.append("logs"),
            start_monitor=lambda: began.append("autoscaler"),
        )
        monkeypatch.setattr(worker, "_global_node", node)
        start_monitors()
        assert began == ["logs", "autoscaler"]

    def test_where_that_fails_it_is_logged_what_is_missing(self, monkeypatch, caplog):
        caplog.set_level(logging.WARNING, "rayrpc")
        monkeypatch.setattr(worker, "_global_node", None)
        start_monitors()
        assert "`ray status` and the logs of Ray's drivers may be empty" in caplog.text
