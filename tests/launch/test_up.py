"""`rayrpc up`: a local cluster with torch loaded, until `rayrpc down`."""

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import IS_MEASURED, eventually

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


def ranks_of(run):
    """Return the process ids of a program's two ranks."""

    def found():
        return {int(each) for each in re.findall(r"pid (\d+), threads", run.output)}

    assert eventually(lambda: len(found()) == 2, 60), run.output
    return found()


def have_ended(pids):
    return eventually(lambda: not any(map(psutil.pid_exists, pids)), 10)


def has_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(IS_MEASURED, reason="workers whose coverage is measured are not forked")
def test_the_workers_of_all_programs_are_forked_from_one_that_has_loaded_torch(
    start, script, environ, rayrpc_command
):
    status, text = rayrpc_command("down")
    assert status == 0 and "no local cluster is up" in text
    status, text = rayrpc_command("up")
    assert status == 0 and "is up; `rayrpc down`" in text, text
    try:
        status, text = rayrpc_command("up")
        assert status == 0 and "is up already" in text, text
        path = script(RANKS)
        loaders = set()
        for threads in (None, None, "1"):
            own = {**environ, "OMP_NUM_THREADS": threads, "WAITS": "1"}
            one = start("-m", "rayrpc", "run", path, **own)
            ranks = ranks_of(one)
            (loader,) = {psutil.Process(pid).ppid() for pid in ranks}
            assert has_torch(loader)
            loaders.add(loader)
            if threads:
                assert one.output.count("threads 1") == 2, one.output
            status, text = rayrpc_command("stack")
            assert "rank0 waits in shutdown for rank1 (" in text and ", in main" in text, text

            # they end with their program, however that ends
            os.kill(one.process.pid, signal.SIGKILL)
            assert have_ended(ranks)
        assert len(loaders) == 2  # by what torch reads when it is loaded
    finally:
        status, text = rayrpc_command("down")
    assert status == 0 and "is down" in text, text
    assert have_ended(loaders)


def test_a_cluster_that_is_kept_ends_when_none_uses_it(start, script, environ, rayrpc_command):
    own = {**environ, "RAYRPC_IDLE_TIMEOUT": "4"}
    begin = time.monotonic()
    one = start("-m", "rayrpc", "up", **own)
    assert one.end(100) == 0, one.output
    # on a busy machine it may have ended before `up` has
    (log,) = Path(environ["RAY_TMPDIR"]).glob("rayrpc-*/cluster-*.log")
    assert eventually(lambda: not log.with_suffix(".sock").exists(), 60)
    assert time.monotonic() > begin + 4
