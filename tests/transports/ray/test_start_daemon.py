"""Ray's daemons beside JupyterLab."""

import pytest
from conftest import IS_MEASURED, ROOT, python_path

SLOW_PACKAGE = """
import os, sys

with open(os.environ["IMPORTERS"], "a") as file:
    print(sys.argv[0], file=file)


def is_valid_syntax(*_):
    return True
"""
STARTS = """
import time
from pathlib import Path

import ray

from rayrpc._transports.ray.node_start import adapt_start, start_monitors

adapt_start(late_monitors=True)
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
start_monitors()
print("the task returned", ray.get(ray.remote(lambda: 2).remote(), timeout=60))
logs = Path(ray._private.worker._global_node.get_logs_dir_path())
waits_for = {"dashboard_agent.log", "runtime_env_agent.log", "log_monitor.log", "monitor.log"}
end = time.monotonic() + 60
while waits_for and time.monotonic() < end:
    time.sleep(0.1)
    waits_for -= {path.name for path in logs.iterdir() if path.stat().st_size}
print("daemons without a log:", *waits_for)
ray.shutdown()
"""


@pytest.mark.process
@pytest.mark.skipif(IS_MEASURED, reason="with coverage, each process imports more")
def test_no_daemon_of_ray_imports_what_jupyterlab_brings(start, script, tmp_path):
    package = tmp_path / "packages"
    package.mkdir()
    (package / "rfc3987_syntax.py").write_text(SLOW_PACKAGE)
    importers = tmp_path / "importers"
    path = script(STARTS)
    environ = {"PYTHONPATH": python_path(ROOT, package), "IMPORTERS": str(importers)}
    one = start(path, RAY_ADDRESS=None, **environ)
    assert one.end() == 0, one.output
    assert "the task returned 2" in one.output
    assert "daemons without a log:\n" in one.output
    found = set(importers.read_text().split())
    assert str(path) in found  # a program of a user's
    workers = {name for name in found if name.endswith("default_worker.py")}
    assert found == {str(path)} | workers
