"""`rayrpc up`: ranks in processes that had loaded torch before, until `rayrpc down`."""

import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import eventually

RANKS = """
import os, time
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def main(rank):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    other = f"rank{1 - rank}"
    print(f"pid {rpc.rpc_sync(other, os.getpid)}, threads {torch.get_num_threads()}", flush=True)
    if "WAITS" in os.environ and rank == 1:
        time.sleep(100)
    rpc.shutdown()

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mp.spawn(main, nprocs=2)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def environ():
    # the folder's name is short: sockets are in it
    folder = tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"])
    return {"RAY_ADDRESS": None, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": None}


@pytest.fixture
def rayrpc_command(start, environ):
    """Run ``rayrpc ARGS`` to its end; return the exit status and the output."""

    def run(*arguments):
        one = start("-m", "rayrpc", *arguments, **environ)
        return one.end(150), one.output

    return run


def standing_by():
    names = {each.pid: each.info["name"] or "" for each in psutil.process_iter(["name"])}
    return {pid for pid, name in names.items() if name.startswith("ray::StandbyWo")}


def is_pool(process):
    return "rayrpc.launch.standby_pool" in (process.info["cmdline"] or ())


def pids(output):
    return {int(each) for each in re.findall(r"pid (\d+), threads", output)}


def test_ranks_run_in_processes_that_stand_by(start, script, environ, rayrpc_command):
    status, text = rayrpc_command("down")
    assert status == 0 and "no local cluster is up" in text
    before = standing_by()
    status, text = rayrpc_command("up", "--set", "standby_workers=2")
    assert status == 0 and "is up, with 2 processes" in text, text
    try:
        waiting = standing_by() - before
        assert len(waiting) == 2
        keeper = next(each for each in psutil.process_iter(["cmdline"]) if is_pool(each))
        assert "libtorch" not in Path(f"/proc/{keeper.pid}/maps").read_text()
        path = script(RANKS)
        one = start("-m", "rayrpc", "run", path, **environ)
        assert one.end(100) == 0 and "done" in one.output, one.output
        assert pids(one.output) == waiting

        # others take their place; a program that needs torch loaded otherwise does not take these
        assert eventually(lambda: len(standing_by() - before) == 2, 60)
        waiting = standing_by() - before
        one = start("-m", "rayrpc", "run", path, **{**environ, "OMP_NUM_THREADS": "1"})
        assert one.end(100) == 0 and one.output.count("threads 1") == 2, one.output
        assert not pids(one.output) & waiting and standing_by() - before == waiting

        # they end with their program, however that ends
        one = start("-m", "rayrpc", "run", path, **environ, WAITS="1")
        assert eventually(lambda: pids(one.output) == waiting, 60), one.output
        status, text = rayrpc_command("stack")
        assert "rank0 waits in shutdown for rank1 (" in text and ", in main" in text, text
        assert re.search(r"rank1 \([^)]*\), which is at .*script.py:\d+, in main", text), text

        # other programs ask none of these, which may be stopped
        stopped = min(waiting)
        os.kill(stopped, signal.SIGSTOP)
        try:
            other = start("-m", "rayrpc", "run", path, **environ)
            assert other.end(20) == 0 and not pids(other.output) & waiting, other.output
            assert all(map(psutil.pid_exists, waiting))
        finally:
            os.kill(stopped, signal.SIGCONT)
        os.kill(one.process.pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(psutil.pid_exists, waiting)), 10)
    finally:
        status, text = rayrpc_command("down")
    assert status == 0 and "is down" in text, text
    assert eventually(lambda: standing_by() <= before)
