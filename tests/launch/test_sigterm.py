"""Processes that SIGTERM ends, as ``Pool.terminate`` does, end as they do without Ray."""

import signal

import pytest
from launching import runner

ATTACHED = """
import signal, sys, time
import rayrpc as rpc

def on_sigterm(number, frame):
    print("handled", flush=True)
    sys.exit(7)

if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, on_sigterm)
rpc.init_rpc("attached")
assert rpc.rpc_sync("attached", max, args=(1, 2)) == 2
print("ready", flush=True)
for _ in range(1000):
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("handler", "status"), [("none", -signal.SIGTERM), ("own", 7)])
def test_a_worker_ends_by_sigterm_without_a_word(ray_cluster, start, script, handler, status):
    one = start(script(ATTACHED), handler, RAYRPC_GROUP=f"sigterm-{handler}")
    one.wait_for("ready")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == status, one.output
    assert one.output == ("ready\nhandled\n" if handler == "own" else "ready\n")


POOLS = """
import multiprocessing, time
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def main(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        pool.map_async(time.sleep, [100] * 4)
        time.sleep(0.5)
    print("terminated", flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    import os
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29541")
    mp.spawn(main, nprocs=1)
    main(0)
"""


def test_the_processes_of_a_pool_are_terminated_without_a_word(ray_cluster, start, script):
    one = runner(start, script)(POOLS)
    assert one.end() == 0, one.output
    assert one.output.count("terminated\n") == 2
    for text in ("SIGTERM", "Exception ignored", "Traceback"):
        assert text not in one.output
