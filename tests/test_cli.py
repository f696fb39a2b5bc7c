"""``rayrpc run``: the exit status, what it refuses, and the local cluster of a run."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from conftest import eventually
from launching import alive, processes_of, runner


@pytest.fixture
def run(start, script):
    return runner(start, script)


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print('done')", 0, "done"),
        ("import sys\nsys.exit(3)", 3, ""),
        ("import sys\nsys.exit('a message')", 1, "a message"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError"),
    ],
    ids=["well", "exit", "message", "exception"],
)
def test_the_exit_status_is_the_scripts(run, code, status, text):
    one = run(code)
    assert one.end() == status
    assert text in one.output
    if text == "ZeroDivisionError":
        assert "Traceback" in one.output and 'script.py", line 2, in f' in one.output
        assert "cli.py" not in one.output  # it begins in the script's own lines


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_ends_everything_at_once(run):
    one = run(
        "import os, time, subprocess\nimport torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    print('rank', os.getpid(), flush=True)\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=2)\n"
    )
    assert eventually(lambda: one.output.count("rank ") == 2), one.output
    pids = [int(line.split()[1]) for line in one.output.splitlines() if "rank " in line]
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.end(60) == 130  # the ranks would sleep longer
    assert eventually(lambda: not any(map(alive, pids)))


def test_an_unknown_setting_names_the_nearest(run):
    one = run("print('ran')", options=("--set", "rpc_timout=3"))
    assert one.end() == 2
    assert "the nearest valid key is 'rpc_timeout'" in one.output
    assert "ran" not in one.output.split()


def test_a_setting_without_a_value_is_refused(run):
    one = run("print('ran')", options=("--set", "dashboard"))
    assert one.end() == 2
    assert "KEY=VALUE" in one.output


def test_a_script_that_is_not_there_is_named(start):
    one = start("-m", "rayrpc", "run", "missing.py")
    assert one.end() == 2
    assert "there is no script missing.py" in one.output


def test_processes_started_by_hand_share_a_cluster_that_ends_with_them(start, script, tmp_path):
    folder = Path("/tmp") / f"rr-{os.getpid()}"  # short: sockets are in it
    folder.mkdir()
    text = script(
        "import os, sys\nimport torch.distributed.rpc as rpc\n"
        "import torch.multiprocessing as mp\n"
        "rank = int(sys.argv[1])\n"
        "def one(rank):\n"
        "    print('an actor is here, at nice', os.nice(0), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    rpc.init_rpc(f'w{rank}', rank=rank, world_size=2)\n"
        "    print(rpc.rpc_sync(f'w{1 - rank}', rpc.get_worker_info).name, flush=True)\n"
        "    rpc.shutdown()\n"
        "    if rank == 0:\n"
        "        mp.spawn(one, nprocs=1)\n"
    )
    environ = {"RAY_ADDRESS": None, "RAY_TMPDIR": str(folder)}
    environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29670", "RAY_AUTH_MODE": None}
    environ |= {"RAY_worker_niceness": None}
    try:
        runs = [start("-m", "rayrpc", "run", text, str(r), **environ) for r in range(2)]
        # the priority of everything else, not Ray's 15
        said = runs[0].wait_for("an actor is here", 100)
        assert said.endswith(f"at nice {os.nice(0)}"), said
        assert processes_of(str(folder))
        assert [one.end() for one in runs] == [0, 0], runs[0].output + runs[1].output
        assert "w1" in runs[0].output and "w0" in runs[1].output
        assert eventually(lambda: not processes_of(str(folder))), processes_of(str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
