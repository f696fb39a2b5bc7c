"""``rayrpc.spawn``, in torch's place and by itself: where ranks run, and how they end."""

import inspect
import pickle

import pytest
import torch.multiprocessing as mp
from conftest import eventually
from launching import alive, runner

import rayrpc as rpc
from rayrpc.config import Settings
from rayrpc.launch import child_ranks, process, spawning

# -- without Ray ----------------------------------------------------------------------------------


def module_main(rank):
    pass


def install():
    pass


def test_ranks_get_a_shim_where_rayrpc_is_installed(monkeypatch):
    monkeypatch.setattr(process, "_install", None)
    assert spawning._dump_shim(Settings()) is None
    process.set_install(install)
    dumped = spawning._dump_shim(Settings(group="g"))
    assert dumped is not None
    entered = pickle.loads(dumped)
    assert entered.__self__ == process.Shim(
        Settings(group="g").to_dict(), install, spawning.start_processes
    )


@pytest.fixture
def torchs(monkeypatch):
    """Calls that go to torch's own ``start_processes``."""
    calls = []
    monkeypatch.setattr(child_ranks, "start_processes", lambda *args: calls.append(args))
    return calls


def test_another_start_method_stays_with_torch(torchs, monkeypatch):
    monkeypatch.setattr(spawning, "spawn", None)
    spawning.start_processes(module_main, (1,), 2, start_method="fork")
    assert torchs == [(module_main, (1,), 2, True, False, "fork")]


def test_arguments_that_must_be_inherited_stay_with_torch(torchs, monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("Lock objects should only be shared through inheritance")

    monkeypatch.setattr(spawning, "spawn", refuse)
    spawning.start_processes(module_main, (1,), 2, join=False)
    assert torchs == [(module_main, (1,), 2, False, False, "spawn")]
    assert "ranks stay processes of this machine" in caplog.text


def test_other_errors_are_raised(torchs, monkeypatch):
    def refuse(*args):
        raise RuntimeError("as expected")

    monkeypatch.setattr(spawning, "spawn", refuse)
    with pytest.raises(RuntimeError, match="as expected"):
        spawning.start_processes(module_main)
    assert torchs == []


# -- on a cluster ---------------------------------------------------------------------------------


@pytest.fixture
def run(start, script):
    return runner(start, script)


SHARES = """
import multiprocessing, torch
import torch.multiprocessing as mp

def main(rank, model, plain, nested, pipe):
    with torch.no_grad():
        model.weight[rank] = rank + 1.0
    plain[rank] = rank + 10
    nested["a"][0][rank] = rank + 20
    if rank == 1:
        pipe.send(bytes(multiprocessing.current_process().authkey))

def child(tensor):
    tensor += 1

if __name__ == "__main__":
    model = torch.nn.Linear(2, 4, bias=False).share_memory()
    torch.nn.init.zeros_(model.weight)
    plain, deep = torch.zeros(4), torch.zeros(100_000)
    near, far = mp.Pipe()
    mp.spawn(main, args=(model, plain, {"a": [deep]}, far), nprocs=3)
    print("ranks wrote", model.weight[:, 1].tolist(), plain.tolist(), deep[:4].tolist())
    print("the key is ours:", near.recv() == multiprocessing.current_process().authkey)
    one = mp.get_context("spawn").Process(target=child, args=(plain,))
    one.start()
    one.join()
    print("a process wrote", plain.tolist())
"""


@pytest.mark.usefixtures("ray_cluster")
def test_ranks_on_this_node_share_the_tensors_in_their_arguments(run):
    one = run(SHARES)
    assert one.end() == 0, one.output
    assert (
        "ranks wrote [1.0, 2.0, 3.0, 0.0] [10.0, 11.0, 12.0, 0.0] [20.0, 21.0, 22.0, 0.0]"
        in one.output
    ), one.output
    assert "the key is ours: True" in one.output
    assert "a process wrote [11.0, 12.0, 13.0, 1.0]" in one.output


SPAWNS = """
import os, signal, sys, time
import torch.multiprocessing as mp

def main(rank, how):
    if rank == 0:
        print("other-pid", os.getpid(), flush=True)
        open("printed", "w").close()
        time.sleep(1000)
    while not os.path.exists("printed"):
        time.sleep(0.05)
    time.sleep(0.3)
    if how == "raise":
        raise ValueError("as expected")
    if how == "exit":
        sys.exit(5)
    if how == "leave":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    try:
        mp.spawn(main, args=(sys.argv[1],), nprocs=2)
    except mp.ProcessExitedException as exc:
        print("exited", exc.error_index, exc.exit_code, flush=True)
        raise
"""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("how", "texts"),
    [
        (
            "raise",
            ["ProcessRaisedException", "Process 1 terminated", "in main", "as expected"],
        ),
        ("exit", ["ProcessExitedException", "terminated with exit code 5", "exited 1 5"]),
        ("leave", ["ProcessExitedException", "terminated with exit code 3", "exited 1 3"]),
        ("kill", ["ProcessExitedException", "process 1 (pid ", "exited 1 "]),
    ],
)
def test_a_rank_that_fails_ends_the_run(run, how, texts):
    one = run(SPAWNS, how)
    other = int(one.wait_for("other-pid ").split()[1])
    assert one.end() == 1  # the other rank would sleep longer
    assert all(text in one.output for text in texts), one.output
    assert eventually(lambda: not alive(other))


LEAVES = """
import os, time
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def main(rank, status):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3)
    for other in range(3):
        rpc.rpc_sync(f"w{other}", max, args=(1, 2))
    if rank == 1:
        time.sleep(0.3)
        os._exit(status)
    rpc.rpc_sync("w1", time.sleep, args=(100,), timeout=0)

if __name__ == "__main__":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29533"
    try:
        mp.spawn(main, args=(3,), nprocs=3)
    except mp.ProcessExitedException as exc:
        print("exited", exc.error_index, exc.exit_code, flush=True)
"""


@pytest.mark.usefixtures("ray_cluster")
def test_the_rank_that_left_is_named_and_not_those_that_have_lost_it(run):
    one = run(LEAVES)
    assert one.end() == 0, one.output
    assert "exited 1 3\n" in one.output, one.output


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_leaves_with_status_0_has_ended_well(run):
    one = run(
        "import os\nimport torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    if os.fork() == 0:\n"
        "        os._exit(7)\n"  # of a child
        "    os.wait()\n"
        "    os._exit(0)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=2)\n"
        "    print('all ended well')\n"
    )
    assert one.end() == 0, one.output
    assert "all ended well\n" in one.output  # Ray reports the end of a process on its own


@pytest.mark.usefixtures("ray_cluster")
def test_a_context_can_be_joined_later(run):
    one = run(
        "import os, time\nimport torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    time.sleep(0.5)\n"
        "    print(f'rank {rank} is done')\n"
        "if __name__ == '__main__':\n"
        "    context = mp.spawn(main, nprocs=2, join=False)\n"
        "    assert len(set(context.pids())) == 2\n"
        "    assert context.join(timeout=0.01) is False\n"
        "    while not context.join():\n"
        "        pass\n"
        "    print('joined')\n"
    )
    assert one.end() == 0, one.output
    assert "rank 0 is done" in one.output and "rank 1 is done" in one.output
    assert one.output.endswith("joined\n")


def test_spawn_has_the_signature_of_torchs():
    ours = inspect.signature(rpc.spawn).parameters
    theirs = inspect.signature(mp.spawn).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def test_ranks_of_an_installed_program_have_rayrpc_in_place(ray_cluster, start, script):
    one = start(
        script(
            "import rayrpc\nrayrpc.install()\n"
            "import torch.distributed.rpc as rpc\n"
            "import torch.multiprocessing as mp\n"
            "def child(place): print(place, rpc.RRef.__module__, flush=True)\n"
            "def main(rank):\n"
            "    child('rank')\n"
            "    one = mp.get_context('spawn').Process(target=child, args=('child',))\n"
            "    one.start()\n"
            "    one.join()\n"
            "    mp.spawn(nested, nprocs=1)\n"
            "def nested(rank):\n"
            "    import ray\n"
            "    child('actor' if ray.get_runtime_context().get_actor_id() else 'process')\n"
            "if __name__ == '__main__':\n"
            "    rayrpc.spawn(main, nprocs=1)\n"
        )
    )
    assert one.end() == 0, one.output
    for place in ("rank", "child", "actor"):
        assert f"{place} rayrpc." in one.output, one.output
