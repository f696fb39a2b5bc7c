"""A program whose folder is on one host alone runs on others."""

import json
import sys

import pytest
from host_cluster import on_two_hosts
from host_maker import why_impossible

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

# Each host has a /tmp/ray of its own.
FOLDER = "/tmp/ray/program"
FILES = {
    "main.py": """
import torch.distributed.rpc as rpc, torch.multiprocessing as mp
from parts import place

def run(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        for name in ("w0", "w1"):
            print(name, *rpc.rpc_sync(name, place.of_this), flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
""",
    "parts/place.py": """
import pathlib, socket, sys

def of_this():
    text = pathlib.Path("data/numbers.txt").read_text()
    beside = (pathlib.Path(sys.modules["__main__"].__file__).parent / "data/numbers.txt").exists()
    return socket.gethostname(), text, beside, *of_module()[1:]

def of_module():
    return socket.gethostname(), __file__.startswith("/tmp/ray/program")
""",
    "parts/__init__.py": "",
    "data/numbers.txt": "1-2-3",
}
SERVERS = """
import rayrpc as rpc
from parts import place
group = rpc.start_workers(["server"], resources={"resources": {"node:10.88.0.2": 0.01}})
print(*rpc.rpc_sync("server", place.of_module), flush=True)
rpc.shutdown()
"""
COMPILED = {
    "parts/compiled.py": """
import os, socket
from typing import Tuple
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

@torch.jit.ignore
def host() -> str:
    return socket.gethostname()

@torch.jit.ignore
def end() -> int:
    os._exit(1)

@torch.jit.script
def host_and_double(x: Tensor) -> Tuple[str, Tensor]:
    return host(), x + x

@torch.jit.script
def end_it() -> int:
    return end()

class Remote(torch.nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.rref = rpc.remote(name, torch.add, (torch.ones(2), 1))

    def forward(self, x: Tensor) -> Tuple[str, Tensor]:
        future = rpc.rpc_async(self.name, host_and_double, (x,))
        place, doubled = future.wait()
        return place, doubled * self.rref.to_here()

    @torch.jit.export
    def end_worker(self) -> int:
        return rpc.rpc_sync(self.name, end_it)
""",
    "compiled.py": """
import torch
import rayrpc
from parts.compiled import Remote

rayrpc.start_workers(["server"], resources={"resources": {"node:10.88.0.2": 0.01}})
remote = torch.jit.script(Remote("server"))
place, value = remote(torch.ones(2))
print(place, *value.tolist(), flush=True)
try:
    remote.end_worker()
except Exception as exc:
    print(type(exc).__name__, "'server'" in str(exc), flush=True)
rayrpc.shutdown()
""",
}


@pytest.fixture
def cluster(hosts_cluster):
    hosts, environ = hosts_cluster
    return hosts, {**environ, "MASTER_PORT": "29500"}


@pytest.fixture
def run(cluster):
    """Return a function that runs a script of the folder, which is on host 1 alone."""
    hosts, environ = cluster
    write = (
        "import json, os, sys; os.makedirs(sys.argv[1], exist_ok=True); os.chdir(sys.argv[1])\n"
        "for path, text in json.loads(sys.argv[2]).items():\n"
        "    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n"
        "    open(path, 'w').write(text)\n"
    )

    def run_script(name, *options, files=FILES):
        hosts.run(1, sys.executable, "-c", write, FOLDER, json.dumps(files))
        command = [sys.executable, "-m", "rayrpc", "run", *options, f"{FOLDER}/{name}"]
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', FOLDER, *command]
        return hosts.run(1, *enter, timeout=150, environ=environ)

    yield run_script
    hosts.run(1, "rm", "-rf", FOLDER)


def test_modules_and_files_beside_the_script_are_there(run, cluster):
    output = run("main.py", *on_two_hosts(cluster[0]))
    assert output.splitlines() == ["w0 host1 1-2-3 True True", "w1 host2 1-2-3 True False"]


@pytest.mark.slow
def test_another_folder_may_be_sent(run, cluster):
    files = {f"app/{path}": text for path, text in FILES.items() if path != "data/numbers.txt"}
    files["data/numbers.txt"] = "4-5"
    output = run("app/main.py", "--working-dir", ".", *on_two_hosts(cluster[0]), files=files)
    assert output.splitlines() == ["w0 host1 4-5 False True", "w1 host2 4-5 False False"]


@pytest.mark.slow
def test_workers_that_serve_have_the_modules_too(run):
    output = run("serve.py", files={**FILES, "serve.py": SERVERS})
    assert output.split() == ["host2", "False"]


@pytest.mark.slow
def test_compiled_code_calls_workers_on_other_hosts(run):
    output = run("compiled.py", files={**FILES, **COMPILED})
    own = [line for line in output.splitlines() if "(raylet)" not in line]
    assert own == ["host2 4.0 4.0", "WorkerDiedError True"]


@pytest.mark.slow
def test_a_large_folder_is_refused_unless_what_is_large_is_excluded(run, cluster):
    hosts, _ = cluster
    hosts.run(1, "mkdir", "-p", f"{FOLDER}/runs")
    hosts.run(1, "truncate", "-s", "120M", f"{FOLDER}/runs/model.pt")
    with pytest.raises(RuntimeError, match=r"ConfigError: .* most of it in runs \(120 MB\)"):
        run("main.py", *on_two_hosts(hosts))
    assert "w1 host2" in run(
        "main.py", "--set", "working_dir_excludes=[runs]", *on_two_hosts(hosts)
    )
