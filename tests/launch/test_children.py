"""Python processes that a program starts by ``subprocess`` or torchrun have rayrpc in place."""

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from launching import runner

from rayrpc._protocol.origin import Origin
from rayrpc._transports import process_origin
from rayrpc.launch.children import with_folder, without_folder


@pytest.fixture
def run(ray_cluster, start, script):
    return runner(start, script)


TORCHRUN = """
import os
import torch.distributed.rpc as rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
total = rpc.rpc_sync(f"w{1 - rank}", pow, args=(2, rank + 2))
print(f"<{rank} {rpc.RRef.__module__.partition('.')[0]} {total}>", flush=True)
rpc.shutdown()
"""


OPTIONS = ["--nproc-per-node=2", "--master-port=29533"]


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", *OPTIONS],
        ["--nproc-per-node", "2"],
        pytest.param(["-m", "torch.distributed.run", *OPTIONS], marks=pytest.mark.slow),
    ],
    ids=["torchrun", "an option", "a module"],
)
def test_the_workers_of_torchrun_use_rayrpc(ray_cluster, start, script, command):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    one = start("-m", "rayrpc", "run", *command, script(TORCHRUN), PATH=path)
    assert one.end() == 0, one.output
    assert "<0 rayrpc 4>" in one.output and "<1 rayrpc 8>" in one.output


CHILDREN = '''
import os, subprocess, sys

RANK = """
import os, sys
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef
rank = int(sys.argv[1])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
assert rpc.rpc_sync(f"w{1 - rank}", os.getpid) != os.getpid()
print(f"<{rank} {RRef.__module__.partition('.')[0]} {rpc.get_rpc_timeout():g}>")
rpc.shutdown()
"""

LIGHT = """
import sys
print("<light", *[name for name in ("torch", "rayrpc") if name in sys.modules], sys.customized, ">")
"""

WITHOUT = """
import sys
sys.modules["rayrpc"] = None
import torch.distributed.rpc as rpc
print(f"<without {rpc.RRef.__module__}>")
"""

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29534")
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank)]) for rank in range(2)]
    assert [rank.wait(150) for rank in ranks] == [0, 0]
    with open("sitecustomize.py", "w") as file:
        file.write("import sys; sys.customized = 'customized'")
    ours, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([ours, os.getcwd(), *rest])
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=150)
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=150)
'''


def test_children_by_subprocess_use_rayrpc_if_they_use_torch(run):
    one = run(CHILDREN, options=["--set", "rpc_timeout=33"])
    assert one.end() == 0, one.output
    assert "<0 rayrpc 33>" in one.output and "<1 rayrpc 33>" in one.output
    assert "<light customized >" in one.output
    assert "<without torch.distributed.rpc" in one.output
    assert "uses torch's own RPC, since rayrpc cannot be imported there" in one.output


def test_a_folder_is_added_to_a_path_once_and_taken_out_again():
    path = os.pathsep.join(["/one", "/two"])
    longer = with_folder(with_folder(path))
    assert longer.split(os.pathsep)[1:] == ["/one", "/two"]
    assert without_folder(longer) == path
    assert without_folder(with_folder("")) == ""
    folder = Path(with_folder(""))
    assert folder.joinpath("sitecustomize.py").is_file() and folder.is_relative_to(ROOT)


def test_ranks_that_a_program_starts_are_counted_by_their_script(monkeypatch):
    alike = process_origin._is_of_same_script
    monkeypatch.setattr(sys, "argv", ["train.py", "--rank", "0"])
    mine = ["python", "train.py", "--rank", "0"]
    assert alike(mine, mine)
    assert alike(["python", "train.py", "--rank", "1"], mine)
    assert not alike(["python", "other.py", "--rank", "1"], mine)
    assert not alike([], mine)


def test_a_child_by_subprocess_is_of_the_run_of_its_starter(monkeypatch):
    entries: dict[str, object] = {}
    monkeypatch.setattr(process_origin, "_config", lambda: entries)
    process_origin.enter_subprocess(Origin("me", "here", "", "train.py", 1, "run", started=3))
    origin = process_origin.this_origin()
    assert origin.run == "run" and origin.launched and origin.ranks >= 1 and origin.started == 0
