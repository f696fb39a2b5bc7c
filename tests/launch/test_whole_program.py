"""Programs under ``rayrpc run`` that say what they and their ranks find."""

import json
import os
import sys

import pytest
from conftest import ROOT, Run, python_path

HEAD = """
import os, subprocess, sys, json
import beside
import torch
import torch.multiprocessing as mp
import torch.distributed.rpc as rpc

counter = 0

def count():
    global counter
    counter += 1
    return counter

def say(name, value):
    print("fact", json.dumps([name, value]), flush=True)

"""

RANKS = (
    HEAD
    + """
def rank_main(rank, tensor):
    import ray

    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3)
    if rank == 1:
        say("actor", ray.get_runtime_context().get_actor_id())
        say("rank name", __name__)
        say("main is this", sys.modules["__main__"].count is count)
        say("rank env", os.environ.get("SET_BY_SCRIPT"))
        say("rank argv", sys.argv[1:])
        say("rank threads", torch.get_num_threads())
        say("rank cwd", os.getcwd())
        say("tensor", tensor.tolist())
        say("counts", [rpc.rpc_sync("w2", count) for _ in range(3)])
        say("ranks", [i.name for i in rpc._get_current_rpc_agent().get_worker_infos()])
        say("rank beside", beside.VALUE)
    if rank == 0:
        os.write(1, b"by os.write\\n")
        subprocess.run(["echo", "by a child"])
        print("to stderr", file=sys.stderr)
        print("Ünïcode")
    rpc.shutdown()
    if rank == 2:
        print("the last line, without an end", end="")

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29650", SET_BY_SCRIPT="yes")
    say("argv", sys.argv[1:])
    say("name", __name__)
    say("file", os.path.basename(__file__))
    say("beside", beside.VALUE)
    say("threads", torch.get_num_threads())
    say("cwd", os.getcwd())
    mp.spawn(rank_main, args=(torch.ones(2),), nprocs=3)
    say("counter of the launcher", counter)
"""
)

PROCESSES = (
    HEAD
    + """
from torch.utils.data import DataLoader

def shim():
    return rpc.RRef.__module__

def child(queue):
    queue.put((shim(), __name__))

def attached(rank, key):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=key)
    rpc.init_rpc(f"p{rank}", rank=rank, world_size=2)
    value = rpc.rpc_sync(f"p{1 - rank}", count) + rpc.rpc_sync(f"p{1 - rank}", count)
    rpc.shutdown()
    if value != 3:
        sys.exit(9)

def inherits(rank, queue):
    queue.put((rank, os.getpid()))

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost")
    for name, kind in (("Process", mp), ("context", mp.get_context("spawn"))):
        ranks = [mp.get_context("spawn").Process(target=attached, args=(r, "29651"))
                 if kind is not mp else mp.Process(target=attached, args=(r, "29651"))
                 for r in range(2)]
        if name == "Process":
            mp.set_start_method("spawn")
        for r in ranks: r.start()
        for r in ranks: r.join()
        say(name, [r.exitcode for r in ranks])
    queue = mp.get_context("spawn").Queue()
    one = mp.get_context("spawn").Process(target=child, args=(queue,))
    one.start()
    say("shim in a process", queue.get(timeout=60))
    one.join()
    mp.spawn(inherits, args=(queue,), nprocs=2)
    got = sorted(queue.get(timeout=60) for _ in range(2))
    say("inherited", [[r for r, _ in got], os.getpid() in [p for _, p in got]])
    loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=2)
    say("loader", [batch.tolist() for batch in loader])
"""
)
PROCESSES_SECONDS = 240  # it starts a dozen processes that load torch


def run_program(folder, text, timeout):
    """Return what a program says, by name; its "output" and "status", and its "folder"."""
    (folder / "script.py").write_text(text)
    (folder / "beside.py").write_text("VALUE = 'found'\n")
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rayrpc", "run", "script.py", "--flag", "a b"]
    run = Run(command, environ, folder)
    try:
        seen = {"status": run.end(timeout), "output": run.output, "folder": str(folder)}
    finally:
        run.close()
    for line in run.output.splitlines():
        if "fact [" in line:  # after a line without an end, too
            name, value = json.loads(line.partition("fact ")[2])
            seen[name] = value
    return seen


@pytest.fixture(scope="module")
def seen(ray_cluster, tmp_path_factory):
    return run_program(tmp_path_factory.mktemp("ranks"), RANKS, 200)


@pytest.fixture(scope="module")
def seen_in_processes(ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return run_program(folder, PROCESSES, PROCESSES_SECONDS)


def found(seen, name):
    """Return what the program has found under a name."""
    assert name in seen, seen["output"]
    return seen[name]


def test_the_script_is_main_with_its_own_arguments(seen):
    assert found(seen, "argv") == ["--flag", "a b"]
    assert found(seen, "name") == "__main__" and found(seen, "file") == "script.py"
    assert found(seen, "cwd") == seen["folder"]
    assert seen["status"] == 0, seen["output"]


def test_modules_beside_the_script_are_found_everywhere(seen):
    assert found(seen, "beside") == found(seen, "rank beside") == "found"


def test_functions_of_the_script_go_by_reference(seen):
    assert found(seen, "counts") == [1, 2, 3]
    assert found(seen, "counter of the launcher") == 0


def test_ranks_have_the_environment_arguments_and_folder_of_the_script(seen):
    assert found(seen, "rank env") == "yes"
    assert found(seen, "rank argv") == ["--flag", "a b"]
    assert found(seen, "rank cwd") == seen["folder"]


def test_ranks_have_the_threads_of_a_plain_process(seen):
    assert found(seen, "rank threads") == found(seen, "threads")


def test_ranks_are_actors_that_load_the_script_as_multiprocessing_would(seen):
    assert found(seen, "actor")
    assert found(seen, "rank name") == "__mp_main__" and found(seen, "main is this")
    assert found(seen, "ranks") == ["w0", "w1", "w2"]


def test_arguments_of_spawn_arrive(seen):
    assert found(seen, "tensor") == [1.0, 1.0]


@pytest.mark.parametrize(
    "text",
    ["by os.write\n", "by a child\n", "to stderr\n", "Ünïcode\n", "last line, without an end"],
)
def test_what_ranks_print_reaches_the_terminal(seen, text):
    assert text in seen["output"]


# -- processes that a program starts beside its ranks ----------------------------------------------


@pytest.mark.slow
def test_ranks_that_must_inherit_stay_processes(seen_in_processes):
    assert found(seen_in_processes, "inherited") == [[0, 1], False]


@pytest.mark.parametrize("name", ["Process", "context"])
@pytest.mark.slow
def test_processes_that_the_script_starts_attach(seen_in_processes, name):
    assert found(seen_in_processes, name) == [0, 0], seen_in_processes["output"]


@pytest.mark.slow
def test_the_shim_is_in_place_in_processes_that_the_script_starts(seen_in_processes):
    module, name = found(seen_in_processes, "shim in a process")
    assert module.startswith("rayrpc") and name == "__mp_main__"


@pytest.mark.slow
def test_the_workers_of_a_data_loader_work(seen_in_processes):
    assert found(seen_in_processes, "loader") == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
