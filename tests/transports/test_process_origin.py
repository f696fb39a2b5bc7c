"""Which run a process belongs to, by how it was started."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch.multiprocessing
from conftest import ROOT, python_path

from rayrpc._protocol.origin import Origin
from rayrpc._transports.process_origin import count_ranks, enter, origin_of_ranks, this_origin

WAIT = 300.0


def tell(queue, started=None, told=None):
    if started is not None:
        started.wait(WAIT)  # until all children run
    queue.put(tuple(this_origin()))
    if told is not None:
        told.wait(WAIT)


def tell_as_rank(rank, *args):
    tell(*args)


def tell_as_hosted(queue, origin):
    enter(Origin(*origin))
    queue.put(tuple(this_origin()))
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(queue,))
    child.start()
    child.join(WAIT)


@contextlib.contextmanager
def children(method, count):
    """Yield the origins of children that run at the same time."""
    context = multiprocessing.get_context(method)
    queue, started, told = context.Queue(), context.Event(), context.Event()
    running = [context.Process(target=tell, args=(queue, started, told)) for _ in range(count)]
    for child in running:
        child.start()
    started.set()
    try:
        yield [Origin(*queue.get(timeout=WAIT)) for _ in running]
    finally:
        told.set()
    for child in running:
        child.join(WAIT)


def test_a_process_started_by_hand_is_of_no_starter():
    here = this_origin()
    assert here == this_origin() and not here.launched and here[-2:] == (1, 0)
    assert here.user and here.host and here.pid == os.getpid()
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json\nfrom rayrpc._transports.process_origin import "
            "this_origin\nprint(json.dumps(this_origin()))",
        ],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=WAIT,
    )
    there = Origin(*json.loads(other.stdout))
    assert there.run != here.run and not there.launched
    assert (there.user, there.host, there.loopback) == (here.user, here.host, here.loopback)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_have_the_run_of_their_parent_and_count_one_another(method):
    here = this_origin()
    with children(method, 2) as origins:
        assert this_origin().started == 2
    for origin in origins:
        assert origin == here._replace(launched=True, ranks=2)


def test_forked_children_have_the_run_of_their_parent():
    # in a process without threads, which a fork would break
    code = f"""
import multiprocessing, sys
sys.path.insert(0, {str(ROOT / "tests" / "transports")!r})
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_process_origin import children, this_origin
with children("fork", 2) as origins:
    pass
assert origins == [this_origin()._replace(launched=True, ranks=2)] * 2, origins
"""
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=2 * WAIT)


def test_torchs_own_spawn_hands_the_run_down():
    context = multiprocessing.get_context("spawn")
    queue, started, told = context.Queue(), context.Event(), context.Event()
    here = this_origin()
    args = (queue, started, told)
    ranks = torch.multiprocessing.spawn(tell_as_rank, args, nprocs=2, join=False)
    started.set()
    assert Origin(*queue.get(timeout=WAIT)) == here._replace(launched=True, ranks=2)
    told.set()
    while not ranks.join(WAIT):
        pass


def test_a_hosted_worker_and_its_children_have_the_run_of_the_program():
    count_ranks(3)
    try:
        given = origin_of_ranks()
        assert this_origin().started == 3
    finally:
        count_ranks(-3)
    assert given == this_origin()._replace(launched=True, ranks=3)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "transports")!r})
sys.path.insert(0, {str(ROOT / "tests")!r})
import multiprocessing, json
from test_process_origin import tell_as_hosted
if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").Queue()
    tell_as_hosted(queue, {tuple(given)!r})
    print(json.dumps([queue.get(timeout=60), queue.get(timeout=60)]))
"""
    hosted = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=2 * WAIT,
    )
    itself, child = (Origin(*each) for each in json.loads(hosted.stdout))
    assert itself == given
    assert child == given._replace(ranks=1)


def test_counting_is_safe_in_threads():
    threads = [threading.Thread(target=lambda: [count_ranks(1) for _ in range(500)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert this_origin().started == 1000
    count_ranks(-1000)
    assert this_origin().started == 0
