"""What tests of launching share: a script that probes its ranks, and processes."""

import contextlib
import json
import os
import sys
from pathlib import Path

from conftest import ROOT, Run


def runner(start, script):
    """Return a function that starts ``rayrpc run SCRIPT ARGS`` with the script's text."""

    def run_one(text, *arguments, options=(), **environ):
        return start("-m", "rayrpc", "run", *options, script(text), *arguments, **environ)

    return run_one


PROBE = """
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


PROBE_SECONDS = 240  # it starts a dozen processes that load torch
_facts = {}


def run_probe(tmp_path_factory):
    """Run the script above, once a session.

    Returns:
        dict: what it found, by name; "output" and "status" of the run, and the "folder" it ran in.
    """
    if not _facts:
        _facts.update(_run_probe(tmp_path_factory.mktemp("probe")))
    return _facts


def _run_probe(folder):
    (folder / "script.py").write_text(PROBE)
    (folder / "beside.py").write_text("VALUE = 'found'\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rayrpc", "run", "script.py", "--flag", "a b"]
    run = Run(command, environ, folder)
    facts = {"status": run.end(PROBE_SECONDS), "output": run.output, "folder": str(folder)}
    for line in run.output.splitlines():
        if "fact [" in line:  # after a line without an end, too
            name, value = json.loads(line.partition("fact ")[2])
            facts[name] = value
    run.close()
    return facts


def found(seen, name):
    """Return what the script has found under a name."""
    assert name in seen, seen["output"]
    return seen[name]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended, but was not reaped, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


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
