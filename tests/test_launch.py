"""``rayrpc run``, ``rayrpc.spawn`` and ``start_workers``: where ranks run, print and end."""

import contextlib
import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import ray
import targets
import torch.multiprocessing as mp
from conftest import ROOT, Run, eventually

import rayrpc as rpc
from rayrpc import config, errors

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def run(start, script):
    """Start ``rayrpc run SCRIPT ARGS`` with the script's text."""

    def run_one(text, *arguments, options=(), **environ):
        return start("-m", "rayrpc", "run", *options, script(text), *arguments, **environ)

    return run_one


# -- one script that looks around -----------------------------------------------------------------

LOOKS_AROUND = """
import os, subprocess, sys, json
import beside
import torch
import torch.multiprocessing as mp
import torch.distributed.rpc as rpc
from torch.utils.data import DataLoader

loads = 0
loads += 1
counter = 0

def count():
    global counter
    counter += 1
    return counter

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

def say(name, value):
    print("fact", json.dumps([name, value]), flush=True)

def rank_main(rank, tensor):
    import ray

    rpc.init_rpc(f"w{rank}", rank=rank, world_size=4)
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
    if rank == 3:
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
    mp.spawn(rank_main, args=(torch.ones(2),), nprocs=4)
    say("counter of the launcher", counter)

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


@pytest.fixture(scope="module")
def seen(ray_cluster, tmp_path_factory):
    """What the script above found, by name; "output" and "status" of the whole run."""
    folder = tmp_path_factory.mktemp("looks")
    (folder / "script.py").write_text(LOOKS_AROUND)
    (folder / "beside.py").write_text("VALUE = 'found'\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rayrpc", "run", "script.py", "--flag", "a b"]
    run = Run(command, environ, folder)
    facts = {"status": run.end(110), "output": run.output, "folder": str(folder)}
    for line in run.output.splitlines():
        if "fact [" in line:  # after a line without an end, too
            name, value = json.loads(line.partition("fact ")[2])
            facts[name] = value
    run.process.stdout.close()
    return facts


def found(seen, name):
    assert name in seen, seen["output"]
    return seen[name]


class TestARun:
    def test_the_script_is_main_with_its_own_arguments(self, seen):
        assert found(seen, "argv") == ["--flag", "a b"]
        assert found(seen, "name") == "__main__" and found(seen, "file") == "script.py"
        assert found(seen, "cwd") == seen["folder"]
        assert seen["status"] == 0, seen["output"]

    def test_modules_beside_the_script_are_found_everywhere(self, seen):
        assert found(seen, "beside") == found(seen, "rank beside") == "found"

    def test_ranks_are_actors_that_load_the_script_as_multiprocessing_would(self, seen):
        assert found(seen, "actor")
        assert found(seen, "rank name") == "__mp_main__" and found(seen, "main is this")
        assert found(seen, "ranks") == ["w0", "w1", "w2", "w3"]

    def test_functions_of_the_script_go_by_reference(self, seen):
        assert found(seen, "counts") == [1, 2, 3]
        assert found(seen, "counter of the launcher") == 0

    def test_ranks_have_the_environment_arguments_and_folder_of_the_script(self, seen):
        assert found(seen, "rank env") == "yes"
        assert found(seen, "rank argv") == ["--flag", "a b"]
        assert found(seen, "rank cwd") == seen["folder"]

    def test_arguments_of_spawn_arrive(self, seen):
        assert found(seen, "tensor") == [1.0, 1.0]

    def test_ranks_have_the_threads_of_a_plain_process(self, seen):
        assert found(seen, "rank threads") == found(seen, "threads")

    @pytest.mark.parametrize(
        "text",
        ["by os.write\n", "by a child\n", "to stderr\n", "Ünïcode\n", "last line, without an end"],
    )
    def test_what_ranks_print_reaches_the_terminal(self, seen, text):
        assert text in seen["output"]

    @pytest.mark.parametrize("name", ["Process", "context"])
    def test_processes_that_the_script_starts_attach(self, seen, name):
        assert found(seen, name) == [0, 0], seen["output"]

    def test_the_shim_is_in_place_in_processes_that_the_script_starts(self, seen):
        module, name = found(seen, "shim in a process")
        assert module.startswith("rayrpc") and name == "__mp_main__"

    def test_ranks_that_must_inherit_stay_processes(self, seen):
        assert found(seen, "inherited") == [[0, 1], False]

    def test_the_workers_of_a_data_loader_work(self, seen):
        assert found(seen, "loader") == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


# -- how runs end ---------------------------------------------------------------------------------


class TestTheEnd:
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
    def test_the_exit_status_is_the_scripts(self, run, code, status, text):
        one = run(code)
        assert one.end() == status
        assert text in one.output
        if text == "ZeroDivisionError":
            assert "Traceback" in one.output and 'script.py", line 2, in f' in one.output
            assert "cli.py" not in one.output  # it begins in the script's own lines

    SPAWNS = """
import os, signal, sys, time
import torch.multiprocessing as mp

def main(rank, how):
    if rank == 0:
        print("other-pid", os.getpid(), flush=True)
        open("printed", "w").close()
        time.sleep(100)
    while not os.path.exists("printed"):
        time.sleep(0.05)
    time.sleep(0.3)
    if how == "raise":
        raise ValueError("as expected")
    if how == "exit":
        sys.exit(5)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    try:
        mp.spawn(main, args=(sys.argv[1],), nprocs=2)
    except mp.ProcessExitedException as exc:
        print("exited", exc.error_index, exc.exit_code, flush=True)
        raise
"""

    @pytest.mark.parametrize(
        ("how", "texts"),
        [
            (
                "raise",
                ["ProcessRaisedException", "Process 1 terminated", "in main", "as expected"],
            ),
            ("exit", ["ProcessExitedException", "terminated with exit code 5", "exited 1 5"]),
            ("kill", ["ProcessExitedException", "process 1 (pid ", "exited 1 "]),
        ],
    )
    def test_a_rank_that_fails_ends_the_run(self, run, how, texts):
        one = run(self.SPAWNS, how)
        other = int(one.wait_for("other-pid ").split()[1])
        start = time.monotonic()
        assert one.end(30) == 1
        assert time.monotonic() - start < 20
        assert all(text in one.output for text in texts), one.output
        assert eventually(lambda: not alive(other), 5)

    def test_ctrl_c_ends_everything_at_once(self, run):
        one = run(
            "import os, time, subprocess\nimport torch.multiprocessing as mp\n"
            "def main(rank):\n"
            "    print('rank', os.getpid(), flush=True)\n"
            "    time.sleep(100)\n"
            "if __name__ == '__main__':\n"
            "    mp.spawn(main, nprocs=2)\n"
        )
        assert eventually(lambda: one.output.count("rank ") == 2, 60), one.output
        pids = [int(line.split()[1]) for line in one.output.splitlines() if "rank " in line]
        os.killpg(one.process.pid, signal.SIGINT)
        start = time.monotonic()
        assert one.end(20) == 130
        assert time.monotonic() - start < 8
        assert eventually(lambda: not any(map(alive, pids)), 5)

    def test_a_context_can_be_joined_later(self, run):
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


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class TestRefusals:
    def test_a_rank_that_cannot_be_placed_names_the_missing_resource(self, run):
        one = run(
            "import torch.multiprocessing as mp\nimport time\n"
            "def main(rank): pass\n"
            "if __name__ == '__main__':\n"
            "    start = time.monotonic()\n"
            "    try:\n"
            "        mp.spawn(main, nprocs=2)\n"
            "    finally:\n"
            "        print('seconds', int(time.monotonic() - start), flush=True)\n",
            options=("--set", 'workers={"rank*": {"num_gpus": 1}}'),
        )
        assert one.end() == 1
        assert "PlacementError" in one.output and "'rank0' asks for GPU: 1" in one.output
        assert int(one.wait_for("seconds").split()[1]) < 15

    def test_an_unknown_setting_names_the_nearest(self, run):
        one = run("print('ran')", options=("--set", "rpc_timout=3"))
        assert one.end() == 2
        assert "the nearest valid key is 'rpc_timeout'" in one.output
        assert "ran" not in one.output.split()

    def test_a_setting_without_a_value_is_refused(self, run):
        one = run("print('ran')", options=("--set", "dashboard"))
        assert one.end() == 2
        assert "KEY=VALUE" in one.output

    def test_a_script_that_is_not_there_is_named(self, start):
        one = start("-m", "rayrpc", "run", "missing.py")
        assert one.end() == 2
        assert "there is no script missing.py" in one.output


def test_spawn_has_the_signature_of_torchs():
    ours = inspect.signature(rpc.spawn).parameters
    theirs = inspect.signature(mp.spawn).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


# -- clusters that start by themselves ------------------------------------------------------------


def processes_of(folder: str) -> list[str]:
    """Return the command lines of processes that belong to a local cluster kept in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = (path / "environ").read_bytes().decode(errors="replace")
            ours = ("raylet", "gcs_server", "ray_local", "ray::", "ray/", "log_monitor")
            if any(name in command for name in ours) and folder in command + environ:
                found.append(command)
    return found


def test_processes_started_by_hand_share_a_cluster_that_ends_with_them(start, script, tmp_path):
    folder = Path("/tmp") / f"rr-{os.getpid()}"  # short: sockets are in it
    folder.mkdir()
    text = script(
        "import sys\nimport torch.distributed.rpc as rpc\n"
        "import torch.multiprocessing as mp\n"
        "rank = int(sys.argv[1])\n"
        "def one(rank): print('an actor is here', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    rpc.init_rpc(f'w{rank}', rank=rank, world_size=2)\n"
        "    print(rpc.rpc_sync(f'w{1 - rank}', rpc.get_worker_info).name, flush=True)\n"
        "    rpc.shutdown()\n"
        "    if rank == 0:\n"
        "        mp.spawn(one, nprocs=1)\n"
    )
    environ = {"RAY_ADDRESS": None, "RAY_TMPDIR": str(folder)}
    environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29670", "RAY_AUTH_MODE": None}
    try:
        runs = [start("-m", "rayrpc", "run", text, str(r), **environ) for r in range(2)]
        runs[0].wait_for("an actor is here", 100)
        assert processes_of(str(folder))
        assert [one.end() for one in runs] == [0, 0], runs[0].output + runs[1].output
        assert "w1" in runs[0].output and "w0" in runs[1].output
        assert eventually(lambda: not processes_of(str(folder)), 20), processes_of(str(folder))
    finally:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


# -- workers for a notebook -----------------------------------------------------------------------


def reservations():
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


class TestStartWorkers:
    def test_workers_serve_until_they_are_stopped(self, capfd):
        group = rpc.start_workers(["carol"], me="me")
        try:
            assert [info.name for info in group] == ["carol"] and len(group) == 1
            assert rpc.rpc_sync("carol", targets.whoami) == "carol"
            assert group["carol"] == rpc.get_worker_info("carol")
            rpc.rpc_sync("carol", targets.say, args=("hello",))
            seen = ["", ""]

            def printed():
                for i, text in enumerate(capfd.readouterr()):
                    seen[i] += text
                return "(carol) hello\n" in seen[0] and "(carol) hello-err\n" in seen[1]

            assert eventually(printed, 10), seen
            worker = rpc.rpc_sync("carol", targets.pid)
            group.stop()
            assert eventually(lambda: not alive(worker), 10)
            with pytest.raises(errors.WorkerDiedError, match="carol"):
                rpc.rpc_sync("carol", targets.whoami)
            again = rpc.start_workers(["carol"])  # the name is free
            assert rpc.rpc_sync("carol", targets.whoami) == "carol"
            worker = rpc.rpc_sync("carol", targets.pid)
            assert len(again) == 1
        finally:
            rpc.shutdown()
        assert eventually(lambda: not alive(worker), 10)  # shutdown ends them, too

    def test_what_a_placement_strategy_reserved_is_given_back(self):
        before = rpc.settings()
        rpc.configure(placement_strategy="PACK")
        try:
            group = rpc.start_workers(["erin"], me="me")
            assert reservations() == ["CREATED"]
            group.stop()
            assert eventually(lambda: reservations() == [], 10)
        finally:
            config.use(before)
            if rpc._is_current_rpc_agent_set():
                rpc.shutdown()

    def test_resources_that_no_node_has_are_refused_by_name(self):
        for resources, name in (
            ({"num_gpus": 1}, "GPU"),
            ({"num_cpus": 1000}, "CPU"),
            ({"resources": {"unobtainium": 1}}, "unobtainium"),
        ):
            with pytest.raises(errors.PlacementError, match=f"'dora' asks for {name}"):
                rpc.start_workers(["dora"], resources=resources)
        assert not rpc._is_current_rpc_agent_set()

    def test_a_static_group_takes_no_workers(self):
        options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29680")
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        try:
            with pytest.raises(errors.GroupError, match="dynamic group"):
                rpc.start_workers(["dora"])
        finally:
            rpc.shutdown()

    def test_names_must_be_a_list(self):
        with pytest.raises(TypeError, match="must be a list"):
            rpc.start_workers("dora")
