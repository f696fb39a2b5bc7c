"""Workers of Ray's own libraries in a group: Data, Train, and jobs; see ``nox -s libraries``."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, eventually, python_path

import rayrpc as rpc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::Warning"),  # those libraries' own
]
WAIT = 60.0
JOB_SECONDS = 120.0

SCRIPT = """
import os, sys
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from helper import double

def main(rank, size):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    print("twice", rpc.rpc_sync(f"rank{(rank + 1) % size}", double, args=(rank + 1,)), flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29650"}
    mp.spawn(main, args=(2,), nprocs=2)
    sys.exit(int(sys.argv[1]))
"""


def _program() -> Any:
    """Return what runs in Ray's workers; local functions go by value: those lack this module."""
    key = f"ray://libraries-{os.getpid()}"

    def join(name):
        options = rpc.TensorPipeRpcBackendOptions(init_method=key)
        rpc.init_rpc(name, rpc_backend_options=options)

    class Ask:
        """Asks the server about each batch; leaves its group only when Ray ends it."""

        def __init__(self):
            join(f"ask-{os.getpid()}")

        def __call__(self, batch):
            ids = torch.tensor(batch["id"])
            batch["y"] = rpc.rpc_sync("server", torch.mul, args=(ids, 2)).numpy()
            return batch

    def train():
        from ray import train

        rank = train.get_context().get_world_rank()
        join(f"trainer{rank}")
        total = rpc.rpc_sync("server", torch.add, args=(torch.ones(1), rank))
        assert total.item() == 1.0 + rank
        rpc.shutdown()

    return join, Ask, train


join, Ask, train = _program()


@pytest.fixture(scope="module")
def server(ray_cluster):
    join("server")
    yield
    rpc.shutdown()


def members():
    return [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()]


def test_actors_of_a_data_set_call_and_leave_with_it(server):
    pytest.importorskip("pyarrow")
    data = pytest.importorskip("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    rows = data.range(60).map_batches(Ask, concurrency=2, batch_size=10).take_all()
    assert sorted((row["id"], row["y"]) for row in rows) == [(i, 2 * i) for i in range(60)]
    assert eventually(lambda: members() == ["server"], WAIT)


def test_workers_of_a_trainer_call_and_leave(server, tmp_path):
    pytest.importorskip("pydantic")
    train_torch = pytest.importorskip("ray.train.torch")
    from ray.train import RunConfig, ScalingConfig

    train_torch.TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert eventually(lambda: members() == ["server"], WAIT)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def head_with_dashboard(port):
    """Start a cluster that takes jobs; yield the environment of its users."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYRPC_"))}
    environ["RAY_AUTH_MODE"] = "disabled"
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = python_path(ROOT)
    command = ["start", "--head", "--block", "--port=0", "--num-cpus=4", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="rr-") as folder:
        command += [f"--dashboard-port={port}", f"--temp-dir={folder}"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]  # the session's has Ray's own
        with subprocess.Popen(
            ["ray", *command], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        ) as head:
            try:
                assert eventually(lambda: _answers(port), WAIT)
                yield environ
            finally:
                head.terminate()


def _run(command, environ):
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=JOB_SECONDS)


def _answers(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=5)


def test_a_job_runs_a_script_and_ends_with_its_status(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    submit = ["ray", "job", "submit", "--address", address, "--working-dir", str(tmp_path), "--"]
    with head_with_dashboard(port) as environ:
        for status in (0, 3):
            command = [*submit, "rayrpc", "run", "script.py", str(status)]
            while "No available agent" in (done := _run(command, environ)).stderr:
                time.sleep(0.5)  # the cluster has just started; pytest's time-out ends this
            assert "twice 2\n" in done.stdout and "twice 4\n" in done.stdout, done
            assert bool(done.returncode) == bool(status), done
        assert "failed with exit code 3" in done.stdout
