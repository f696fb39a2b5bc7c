"""rayrpc in the place of ``torch.distributed.rpc``, and out of it again."""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc
from conftest import ROOT

import rayrpc
from rayrpc import compat
from rayrpc.launch.process import get_install


def rayrpcs(module, name):
    """Return the object of rayrpc that a row of the table names."""
    source = importlib.import_module(module)
    return source if name is None else getattr(source, name)


@pytest.mark.parametrize(
    ("module", "name", "source", "source_name"),
    compat.TABLE,
    ids=[f"{module}.{name}" for module, name, _, _ in compat.TABLE],
)
def test_a_name_of_torch_is_rayrpcs_once_installed(installed, module, name, source, source_name):
    assert getattr(sys.modules[module], name) is rayrpcs(source, source_name)


def test_modules_import_as_rayrpcs_once_installed(installed):
    for name, source in compat.MODULES.items():
        assert importlib.import_module(name) is importlib.import_module(source)


def test_every_public_name_is_replaced(installed):
    ours = {name for module, name, _, _ in compat.TABLE if module == compat.RPC}
    public = {
        *("AllGatherStates", "BackendType", "PyRRef", "RRef", "RpcBackendOptions"),
        *("TensorPipeRpcBackendOptions", "WorkerInfo", "functions", "get_rpc_timeout"),
        *("get_worker_info", "init_rpc", "is_available", "remote", "rpc_async", "rpc_sync"),
        "shutdown",
    }
    assert public <= ours
    # two leftovers of how torch documents RRef's methods call nothing native
    listed = set(getattr(torch.distributed.rpc, "__all__", ())) - {"method_factory", "new_method"}
    for name in listed:
        value = getattr(torch.distributed.rpc, name)
        assert getattr(value, "__module__", "rayrpc").startswith("rayrpc"), name


def test_imports_of_all_forms_give_rayrpcs(installed):
    from torch.distributed import rpc
    from torch.distributed.rpc import RRef, api, functions, init_rpc
    from torch.distributed.rpc.api import _all_gather

    ours: Any = rayrpc
    assert RRef is ours.RRef and init_rpc is rayrpc.init_rpc and rpc.remote is rayrpc.remote
    assert functions.async_execution is rayrpc.functions.async_execution
    assert api is rayrpc.api and _all_gather is rayrpc._all_gather


def snapshot():
    """Return every attribute of the modules that the table touches, and their places."""
    modules = {name: sys.modules[name] for name in {row[0] for row in compat.TABLE}}
    attributes = {
        (name, key): value
        for name, module in modules.items()
        for key, value in vars(module).items()
    }
    return attributes, {name: sys.modules.get(name) for name in compat.MODULES}


def test_uninstall_puts_everything_back():
    before = snapshot()
    compat.install()
    during = snapshot()
    compat.uninstall()
    after = snapshot()
    assert not compat.is_installed()
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert [key for key in old if old[key] is not new[key]] == []
    changed = [key for key in before[0] if before[0][key] is not during[0][key]]
    assert len(changed) > 30


def test_installing_twice_does_nothing_more():
    before = snapshot()
    compat.install()
    compat.install()
    compat.uninstall()
    after = snapshot()
    assert all(before[0][key] is after[0][key] for key in before[0])
    compat.uninstall()


def test_what_installs_rayrpc_is_registered_while_it_is_installed():
    compat.uninstall()
    assert get_install() is None
    compat.install()
    assert get_install() is compat.install
    compat.uninstall()
    assert get_install() is None


def test_tasks_of_torch_jit_are_replaced_if_that_is_asked_for():
    names = ("fork", "script", "wait")
    before = [getattr(torch.jit, name) for name in names]
    compat.install()
    assert [getattr(torch.jit, name) for name in names] == before
    compat.install(jit=True)
    compat.install(jit=True)
    assert [getattr(torch.jit, name) for name in names] == [
        getattr(rayrpc.jit, name) for name in names
    ]
    compat.uninstall()
    assert [getattr(torch.jit, name) for name in names] == before


def test_the_compiler_of_torchscript_knows_our_rref(installed):
    import torch._jit_internal as jit_internal

    ours: Any = rayrpc
    assert jit_internal.RRef is ours.RRef
    assert jit_internal.is_rref(rayrpc.RRef[torch.Tensor])


def test_modules_that_are_imported_late_are_on_their_packages(installed):
    code = "import sys, rayrpc; rayrpc.install(); import torch.distributed.optim as o\n"
    code += "import torch.distributed.nn as n; import rayrpc.nn\n"
    code += "assert o.optimizer is sys.modules['rayrpc.optim']\n"
    code += "assert n.api.remote_module is rayrpc.nn\n"
    code += "assert rayrpc.nn.__spec__.name == 'rayrpc.nn'\n"
    code += "assert o.DistributedOptimizer is rayrpc.optim.DistributedOptimizer\n"
    code += "rayrpc.uninstall(); import torch.distributed.optim.optimizer as late\n"
    code += "assert late.__name__ == 'torch.distributed.optim.optimizer'\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_native_classes_are_rayrpcs(installed):
    from torch._C import _distributed_rpc as native

    ours: Any = rayrpc
    assert native.PyRRef is ours.RRef and native.WorkerInfo is ours.WorkerInfo
    assert not native._is_current_rpc_agent_set()
    options = torch.distributed.rpc.TensorPipeRpcBackendOptions()
    assert isinstance(options, native._TensorPipeRpcBackendOptionsBase)


def test_wait_all_is_safe_where_a_future_fails(installed):
    good, bad = torch.futures.Future(), torch.futures.Future()
    good.set_result(1)
    bad.set_exception(ValueError("as expected"))
    assert torch.futures.wait_all([good, good]) == [1, 1]
    with pytest.raises(ValueError, match="as expected"):
        torch.futures.wait_all([good, bad])


def run_code(start, script, text, **environ):
    run = start(script(text), **environ)
    assert run.end() == 0, run.output
    return run.output


def test_importing_rayrpc_changes_nothing_in_torch(start, script):
    output = run_code(
        start,
        script,
        "import torch, torch.distributed.rpc as rpc, threading\n"
        "before = {k: v for k, v in vars(rpc).items()}\n"
        "import multiprocessing.spawn as spawn\n"
        "data = spawn.get_preparation_data\n"
        "import rayrpc, rayrpc.api, rayrpc.compat, rayrpc.launch.process\n"
        "import rayrpc.launch.spawning, rayrpc.launch.workers, ray\n"
        "assert all(vars(rpc)[k] is v for k, v in before.items())\n"
        "assert spawn.get_preparation_data is data\n"
        "assert not rayrpc.compat.is_installed() and not ray.is_initialized()\n"
        "assert threading.active_count() == 1\n"
        "import rayrpc.futures, rayrpc.launch.worker_pool\n"
        "assert not hasattr(torch.futures.Future, '__await__')\n"
        "rayrpc.install()\n"
        "assert hasattr(torch.futures.Future, '__await__')\n"
        "print('nothing changed')\n",
    )
    assert "nothing changed" in output


# Makes torch one that was built without RPC; `exec`uted before the program.
WITHOUT_RPC = """
import sys
import torch
import torch.distributed

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.rpc" or name.startswith("torch.distributed.rpc."):
            raise ImportError(f"torch has no {name}")
        if name == "torch._C._distributed_rpc":
            raise ImportError("torch was built without RPC")

for name in list(sys.modules):
    if name.startswith("torch.distributed.rpc") or name == "torch._C._distributed_rpc":
        del sys.modules[name]
for owner, name in ((torch.distributed, "rpc"), (torch._C, "_distributed_rpc")):
    if hasattr(owner, name):
        delattr(owner, name)
if hasattr(torch._C, "_rpc_init"):
    del torch._C._rpc_init
sys.meta_path.insert(0, Blocker())
try:
    import torch.distributed.rpc
except ImportError:
    pass
else:
    raise AssertionError("torch has RPC after all")
import rayrpc
rayrpc.install()
"""

# Makes torch's own agent impossible.
NO_AGENT = """
import torch
import torch._C._distributed_rpc as native

def refuse(*args, **kwargs):
    raise AssertionError("a native agent or store was asked for")

native.TensorPipeAgent = native._TensorPipeRpcBackendOptionsBase = refuse
native.RpcAgent = refuse
torch._C._distributed_c10d.TCPStore = torch.distributed.TCPStore = refuse
torch._C._distributed_c10d.FileStore = torch.distributed.FileStore = refuse
import rayrpc
rayrpc.install()
"""

CONVERSATION = """
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef
from torch.distributed.rpc.functions import async_execution

@async_execution
def chained(to, x):
    return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda done: done.wait() * 2)

options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29811", rpc_timeout=50)
rpc.init_rpc("self", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.is_available()
assert rpc.rpc_sync("self", torch.add, args=(torch.ones(2), 1)).sum() == 4
assert rpc.rpc_async("self", chained, args=("self", torch.ones(2))).wait().sum() == 8
rref = rpc.remote("self", dict, kwargs={"a": 1})
assert isinstance(rref, RRef) and rref.to_here() == {"a": 1}
assert rref.rpc_sync().get("a") == 1
assert rpc.rpc_sync("self", lambda r: r.local_value()["a"], args=(rref,)) == 1
try:
    rpc.rpc_sync("self", int, args=("x",))
except ValueError:
    print("the conversation is over")
rpc.shutdown()
"""


@pytest.mark.parametrize("state", [WITHOUT_RPC, NO_AGENT], ids=["no-rpc", "no-agent"])
def test_a_conversation_needs_nothing_of_torchs_rpc(ray_cluster, start, script, state):
    output = run_code(start, script, state + CONVERSATION)
    assert "the conversation is over" in output


def test_the_first_example_runs_where_torch_has_no_rpc(ray_cluster, start, script):
    wrapper = script(
        WITHOUT_RPC
        + "import runpy\n"
        + f"sys.argv[0] = {str(ROOT / 'examples' / 'hello.py')!r}\n"
        + "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    runs = [start(wrapper, "--rank", str(rank), MASTER_PORT="29812") for rank in range(2)]
    assert [run.end() for run in runs] == [0, 0], runs[0].output + runs[1].output
    assert "hello worker0, this is worker1" in runs[0].output
