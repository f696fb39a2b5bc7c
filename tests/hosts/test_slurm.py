"""The job of configs/slurm runs a program on a cluster that it starts and ends.

Slurm is stood in for by two commands: ``srun`` runs a command on the host that it names, and passes
signals on; ``scontrol`` lists the hosts.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, eventually, python_path
from host_maker import hosts_of, why_impossible

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,  # a cluster of two hosts starts by the job, and ends
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

JOB = ROOT / "configs" / "slurm" / "job.sh"
JOB_SECONDS = 200.0
SRUN = """#!{python}
import json, os, signal, subprocess, sys

command = sys.argv[1:]
options = {{}}
while command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    options[name] = value
with open({hosts!r}) as file:
    prefix = json.load(file)[options["--nodelist"]]
assert "--overlap" in options and options["--ntasks"] == options["--nodes"] == "1", options
step = subprocess.Popen(prefix + command)

def pass_on(number, frame):
    with open(f"/proc/{{step.pid}}/task/{{step.pid}}/children") as file:
        for child in file.read().split():
            os.kill(int(child), number)

signal.signal(signal.SIGTERM, pass_on)
status = step.wait()
sys.exit(128 - status if status < 0 else status)
"""
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames host[1-2]" && printf 'host1\\nhost2\\n'
"""
PROGRAM = """
import os, socket, stat, subprocess, sys, time
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

STRANGER = '''
import sys
from ray import _raylet, exceptions
try:
    _raylet.GcsClient(address=sys.argv[1])
except exceptions.AuthenticationError:
    sys.exit(7)
'''

def run(rank, address):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        for name in ("w0", "w1"):
            print("rank on", rpc.rpc_sync(name, socket.gethostname), flush=True)
        print("sum", rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1)).tolist(), flush=True)
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        paths = os.path.dirname(token), token
        modes = [oct(stat.S_IMODE(os.stat(path).st_mode)) for path in paths]
        with open(token) as file:
            print("token", *modes, len(file.read()), flush=True)
        environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        stranger = subprocess.run([sys.executable, "-c", STRANGER, address], env=environ)
        print("stranger", stranger.returncode, flush=True)
        time.sleep(float(sys.argv[1]))
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(run, args=(f"{os.environ['MASTER_ADDR']}:6379",), nprocs=2)
    sys.exit(3)
"""
SAYS = ["stranger 7", "sum [2.0, 2.0]", "token 0o700 0o600 64"]


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the job with arguments, on two hosts."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(hosts_of(2))
        names = {f"host{number}": hosts.command(number) for number in (1, 2)}
        commands, home = tmp_path / "bin", tmp_path / "home"
        commands.mkdir()
        home.mkdir()
        (tmp_path / "hosts.json").write_text(json.dumps(names))
        srun = SRUN.format(python=sys.executable, hosts=str(tmp_path / "hosts.json"))
        for name, text in (("srun", srun), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        (tmp_path / "program.py").write_text(PROGRAM)
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("COVERAGE", "RAY_AUTH"))},
            "HOME": str(home),
            "PATH": os.pathsep.join(
                [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": python_path(ROOT),
            "RAY_TMPDIR": "/tmp/ray",  # each host has its own
            "TMPDIR": "/tmp/ray",
            "SLURM_CPUS_PER_TASK": "4",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "host[1-2]",
        }

        def start_job(*arguments):
            job = stack.enter_context(
                subprocess.Popen(
                    ["bash", str(JOB), str(tmp_path / "program.py"), *arguments],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
            stack.callback(_kill, job)
            return job, hosts, home

        yield start_job


def _kill(job):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


def is_idle(hosts, number):
    return not any(hosts.commands(number, ""))  # what has ended, and waits for its parent, is ""


def assert_ended(hosts, home):
    """Assert that no process of the job is left on the hosts, no token, and no file of Ray's."""
    for number in (1, 2):
        assert eventually(functools.partial(is_idle, hosts, number)), hosts.commands(number, "")
        assert hosts.run(number, "sh", "-c", "ls -d /tmp/ray/ray-* || true") == ""
    assert not list(home.glob(".rayrpc-job-*"))


def test_a_job_runs_its_program_on_its_nodes_and_ends_ray(start):
    job, hosts, home = start("0")
    output, _ = job.communicate(timeout=JOB_SECONDS)
    begins = ("rank on ", "stranger ", "sum ", "token ")
    said = sorted(line for line in output.splitlines() if line.startswith(begins))
    assert said == ["rank on host1", "rank on host2", *SAYS], output
    assert job.returncode == 3, output
    assert_ended(hosts, home)


def test_a_job_that_is_told_to_end_ends_its_program_and_ray(start):
    job, hosts, home = start("600")
    lines = iter(job.stdout.readline, "")
    assert any(line.startswith("stranger") for line in lines)
    job.terminate()
    output = "".join(lines)
    assert job.wait(JOB_SECONDS) == 128 + signal.SIGTERM, output
    assert_ended(hosts, home)
