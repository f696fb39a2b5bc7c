"""``rayrpc run``: the exit status, what it refuses, and the local cluster of a run."""

import functools
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import eventually
from launching import alive, processes_of, runner

from rayrpc import cli


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


HANGS = """
import os, re, sys, threading
{imports}

def hangs_in_python():
    threading.Event().wait()

def hangs_in_c():
    re.match("(a+)+$", "a" * 60 + "b")

def main(rank):
    print("rank", os.getpid(), flush=True)
    (hangs_in_python if rank == 0 else hangs_in_c)()

if __name__ == "__main__":
    {spawn}(main, nprocs=2)
"""


def has_both_ranks(run):
    return run.output.count("rank ") == 2


def are_gone(pids):
    return not any(map(alive, pids))


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_ends_the_ranks(run):
    one = run(
        "import os, time\nimport torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    print('rank', os.getpid(), flush=True)\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=2)\n"
    )
    assert eventually(functools.partial(has_both_ranks, one)), one.output
    pids = [int(line.split()[1]) for line in one.output.splitlines() if "rank " in line]
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.end(60) == 130  # the ranks would sleep longer
    assert eventually(functools.partial(are_gone, pids))


WAITS = """
import os, time
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def block():
    print("it blocks", flush=True)
    time.sleep(1000)

def main(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("w1", block)
    rpc.shutdown()

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29671")
    mp.spawn(main, nprocs=2)
"""


@pytest.mark.usefixtures("ray_cluster")
def test_ctrl_c_shows_where_ranks_were_and_what_they_waited_for(run):
    one = run(WAITS)
    one.wait_for("it blocks")
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.end(60) == 130
    assert re.search(
        r'-- Worker rank0 .*rpc.rpc_sync\("w1", block\)\n  waits for w1 \(block, [\d.]+ s\)\n',
        one.output,
        re.DOTALL,
    ), one.output
    assert re.search(r"-- Worker rank1 .*in block\n", one.output, re.DOTALL), one.output


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("imports", "spawn", "command", "status"),
    [
        ("import torch.multiprocessing as mp", "mp.spawn", ("-m", "rayrpc", "run"), (130,)),
        ("import rayrpc", "rayrpc.spawn", (), (1, 130, -signal.SIGINT)),
        (
            "import rayrpc\nrayrpc.install()\nimport torch.multiprocessing as mp",
            "mp.spawn",
            (),
            (1, 130, -signal.SIGINT),
        ),
    ],
    ids=["run", "spawn", "install"],
)
def test_ctrl_c_ends_everything_and_shows_where_it_was(
    start, script, imports, spawn, command, status
):
    path = script(HANGS.format(imports=imports, spawn=spawn))
    problems = []
    for _ in range(3):  # the program has 5 s of wall clock, which a busy machine may not give it
        one = start(*command, path)
        assert eventually(functools.partial(has_both_ranks, one), 120), one.output
        pids = [int(line.split()[1]) for line in one.output.splitlines() if "rank " in line]
        os.killpg(one.process.pid, signal.SIGINT)
        started = time.monotonic()
        ended = one.end(120)
        seconds = time.monotonic() - started
        assert eventually(functools.partial(are_gone, pids), 60)
        texts = ("in hangs_in_python", "in hangs_in_c", "KeyboardInterrupt")
        missing = [text for text in texts if text not in one.output]
        if ended in status and seconds < 8 and not missing:
            return
        problems.append(f"{ended} after {seconds:.1f} s; {missing} are missing in:\n{one.output}")
    pytest.fail("\n".join(problems))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "rpc_timout=3", __file__], "the nearest valid key is 'rpc_timeout'"),
        (["--set", "dashboard", __file__], "KEY=VALUE"),
        (["--set", "workers={a: {", __file__], "workers"),
        ([], "name a script, or a module by -m"),
        (["missing.py"], "there is no script missing.py"),
        (["ls"], "ls is no script or command in Python"),
        (["-m"], "-m: name a module"),
        (["-m", "no_such_module.main"], "there is no module no_such_module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_run_is_one_line(arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and printed.err.startswith("rayrpc: ")
    assert printed.err.count("\n") == 1 and not printed.out


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


@pytest.mark.parametrize("command", ["up", "down"])
def test_only_a_local_cluster_is_kept(command, capsys):
    assert cli.main([command, "--address", "10.0.0.5:6379"]) == 2
    assert "'10.0.0.5:6379' is named" in capsys.readouterr().err
