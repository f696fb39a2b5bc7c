"""Random programs whose tensors are on a GPU and on the CPU, beside the same in one process.

    PYTHONPATH=tests:tests/autograd rayrpc run tests/autograd/device_programs.py PORT COUNT

``COUNT`` programs run, besides two that are always run.
"""

import os
import sys

import test_random_programs as programs  # type: ignore[import-not-found]
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from hypothesis import example, given, settings
from hypothesis import strategies as st

NAMES = ["driver", "alice", "bob"]
DEVICES = st.lists(st.sampled_from(["cuda:0", "cuda:0", "cpu"]), min_size=3, max_size=3)
MIXED = ["cuda:0", "cpu", "cuda:0"]


def check(count):
    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @example(program=programs.RESIDUAL, hooks=set(), passes=1, devices=MIXED)
    @example(program=programs.RESIDUAL, hooks={"tensor hook", "many"}, passes=2, devices=MIXED)
    @given(
        program=programs.PROGRAMS,
        hooks=programs.LEAF_HOOKS,
        passes=st.integers(1, 2),
        devices=DEVICES,
    )
    def each(program, hooks, passes, devices):
        done.append(program)
        programs.compare(program, hooks, passes, devices)

    done = []
    each()
    print(f"{len(done)} programs do what they do in one process")


def rank(number, count):
    options = rpc.TensorPipeRpcBackendOptions()
    for name in NAMES:
        options.set_device_map(name, {0: 0})
    rpc.init_rpc(NAMES[number], rank=number, world_size=3, rpc_backend_options=options)
    if number == 0:
        check(count)
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.cuda.is_available()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank, args=(i, int(sys.argv[2]))) for i in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
